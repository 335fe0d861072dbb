"""The protocol of a sandbox: what a pool needs of it.

A sandbox is anything that serves one session at a time and is expensive to start: a simulator process, a container, a machine.
"""

from typing import Protocol

from rollbook.contracts.errors import EpisodeError, TransientError


class SandboxDiedError(EpisodeError):
    """The sandbox of a running episode is gone. The agent did not cause it: the episode is dropped and not scored."""


class SandboxStartError(TransientError):
    """A sandbox could not be started. The pool tries again, with growing waits."""


class Sandbox(Protocol):
    @property
    def name(self) -> str:
        """For logs and errors: `ministack:4566`."""

    @property
    def is_alive(self) -> bool:
        """Whether its processes exist, without a request."""

    async def is_healthy(self) -> bool:
        """Whether it responds; checked before each lease. Never raises."""

    def memory_bytes(self) -> int:
        """Memory of all its processes; 0 when unknown."""

    async def clean(self) -> None:
        """Restore the state of a new sandbox. Raises `SandboxDiedError` when that fails."""

    async def died(self) -> None:
        """Returns when one of its processes has ended."""

    async def remove(self) -> None:
        """Remove it with everything it started. Never raises, and may be called twice."""
