"""What a pool needs to know of a sandbox: is it well, how big is it, make it clean, take it away.

A sandbox is anything that serves one session at a time and costs something to start: a simulator process, a container, a machine.
What can be *done* in it is the business of the environment that uses it.
"""

from typing import Protocol

from rollbook.contracts.errors import EpisodeError, TransientError


class SandboxDiedError(EpisodeError):
    """The sandbox under a running episode is gone. Never the agent's fault: the episode is given up and not scored."""


class SandboxStartError(TransientError):
    """A sandbox could not be started. The pool tries again, with growing waits."""


class Sandbox(Protocol):
    """One place for one session at a time."""

    @property
    def name(self) -> str:
        """For logs and errors: `ministack:4566`."""

    @property
    def is_alive(self) -> bool:
        """Without asking it: are its processes there?"""

    async def is_well(self) -> bool:
        """Asked before it is lent: does it answer? Never raises; a sandbox that cannot say is not well."""

    def memory_bytes(self) -> int:
        """What it holds now, all its processes together; 0 when that cannot be known."""

    async def clean(self) -> None:
        """Back to the state of a fresh one. Raises `SandboxDiedError` when that cannot be done."""

    async def died(self) -> None:
        """Returns when one of its processes has ended."""

    async def remove(self) -> None:
        """Take it away with everything it started. Never raises, and may be called twice."""
