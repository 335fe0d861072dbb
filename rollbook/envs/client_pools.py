"""Two ways to play a group of sessions, behind one door: `GrpoPool` awaits, `MultiTurnEnvPool` blocks. Both promise the same."""

from rollbook.envs.blocking_pool import BlockingSession, MultiTurnEnvPool
from rollbook.envs.client import ClientOptions, EnvSession
from rollbook.envs.group_pool import GroupResult, GroupTooLargeError, GrpoPool

__all__ = [
    "BlockingSession",
    "ClientOptions",
    "EnvSession",
    "GroupResult",
    "GroupTooLargeError",
    "GrpoPool",
    "MultiTurnEnvPool",
]
