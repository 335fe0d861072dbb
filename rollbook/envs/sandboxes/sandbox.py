"""The protocol of a slot: what a pool needs of it.

A slot is anything that serves one session at a time and is expensive to start: a simulator process, a container, a machine.
"""

from typing import Protocol

from rollbook.contracts.errors import TransientError


class SandboxStartError(TransientError):
    """A sandbox could not be started. The pool tries again, with growing waits."""


class PoolSlot(Protocol):
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
