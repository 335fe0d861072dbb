"""Two ways to play a group of sessions, behind one door: `GrpoPool` awaits, `MultiTurnEnvPool` blocks. Both promise the same."""

from rollbook.envs.client.blocking import BlockingSession, MultiTurnEnvPool
from rollbook.envs.client.group import GroupResult, GroupTooLargeError, GrpoPool
from rollbook.envs.client.session import ClientOptions, EnvSession

__all__ = [
    "BlockingSession",
    "ClientOptions",
    "EnvSession",
    "GroupResult",
    "GroupTooLargeError",
    "GrpoPool",
    "MultiTurnEnvPool",
]
