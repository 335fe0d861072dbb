"""A pool of sandboxes: each serves one session at a time, starts clean, and is replaced when it dies or grows too large.

At most `size` sandboxes are leased at the same time. `spares` more are kept ready, so that a death or a slow clean-up delays no
session. Waiting sessions are served in order. `MOVES` lists the states of a slot. One task keeps each slot and owns its sandbox
from start to removal.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError, finish
from rollbook.concurrency.retry import backoff
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.envs.sandboxes.process import sweep_orphans
from rollbook.envs.sandboxes.sandbox import PoolSlot, SandboxStartError
from rollbook.telemetry.events import EventLog

S = TypeVar("S", bound=PoolSlot)

REMOVE_WITHIN_S = 20.0
CLEAN_WITHIN_S = 20.0
# A start is CPU-bound: more concurrent starts than cores would only make each slower. At least two, since part of it is waiting.
STARTS_AT_ONCE = max(2, os.cpu_count() or 2)


class PoolExhaustedError(TransientError, RuntimeError):
    """Every sandbox is leased. Also a `RuntimeError`, which is what users of similar pools expect."""


class DoubleReleaseError(RuntimeError):
    """A lease was released twice; the sandbox may already serve another session."""


class SlotState(StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    LEASED = "leased"
    RETURNED = "returned"
    GONE = "gone"


MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.STARTING: frozenset({SlotState.IDLE, SlotState.GONE}),
    SlotState.IDLE: frozenset({SlotState.LEASED, SlotState.STARTING, SlotState.GONE}),
    SlotState.LEASED: frozenset({SlotState.RETURNED, SlotState.GONE}),
    SlotState.RETURNED: frozenset({SlotState.IDLE, SlotState.STARTING, SlotState.GONE}),
    SlotState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How many sandboxes to keep, and the memory above which one is replaced."""

    size: int
    spares: int = 0
    max_memory_bytes: int = 1 << 62

    def __post_init__(self) -> None:
        if self.size < 1 or self.spares < 0:
            raise ValueError(
                f"a pool needs a size of at least 1 and no negative spares, not {self.size} and {self.spares}"
            )


class Slot(Generic[S]):
    """A position in the pool; its sandbox may be replaced, its `index` stays."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = SlotState.STARTING
        self.sandbox: S | None = None
        self.is_suspect = False
        self.changed = asyncio.Event()

    def move(self, to: SlotState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"slot {self.index} cannot move from {self.state} to {to}")
        self.state = to
        self.changed.set()


class Lease(Generic[S]):
    """Exclusive use of a sandbox. Call `release()` once; it does not wait."""

    def __init__(self, sandbox: S, slot: Slot[S], release: Callable[[Slot[S], bool], None]) -> None:
        self.sandbox = sandbox
        self._slot = slot
        self._release: Callable[[Slot[S], bool], None] | None = release

    def release(self, *, is_suspect: bool = False) -> None:
        """End the lease. A suspect sandbox is replaced, not cleaned. Raises `DoubleReleaseError` the second time."""
        if self._release is None:
            raise DoubleReleaseError(
                f"the lease of {self.sandbox.name} was already released; the sandbox may be leased to another session"
            )
        release, self._release = self._release, None
        release(self._slot, is_suspect)


class SandboxPool(Generic[S]):
    """Keeps sandboxes made by `start(slot index)`. Use `async with pool.open():`; the block begins when every slot is ready."""

    def __init__(
        self,
        *,
        name: str,
        limits: PoolLimits,
        start: Callable[[int], Awaitable[S]],
        log: EventLog,
    ) -> None:
        self._name = name
        self._limits = limits
        self._start = start
        self._log = log
        self._slots = [Slot[S](index) for index in range(limits.size + limits.spares)]
        # Unbounded, and never longer than twice the slots: a slot is added when it becomes idle, and removed by `acquire`.
        self._idle: asyncio.Queue[Slot[S]] = asyncio.Queue()
        self._permits = asyncio.Semaphore(limits.size)
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._last_failure = ""
        self.leased = 0
        self.replaced = 0

    @property
    def capacity(self) -> int:
        return self._limits.size

    @property
    def states(self) -> list[SlotState]:
        return [slot.state for slot in self._slots]

    @property
    def sandboxes(self) -> list[S]:
        """All current sandboxes by slot, for inspection only: use needs a lease."""
        return [slot.sandbox for slot in self._slots if slot.sandbox is not None]

    @property
    def memory_bytes(self) -> int:
        return sum(sandbox.memory_bytes() for sandbox in self.sandboxes)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["SandboxPool[S]"]:
        """Sweep orphans, start every slot, and remove all sandboxes at the end. Raises `RunError` when a slot does not start."""
        sweep = await asyncio.to_thread(sweep_orphans)
        if sweep.processes or sweep.directories:
            self._log.info("envs.orphans_swept", processes=sweep.processes, directories=sweep.directories)
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as group:
            keepers: list[asyncio.Task[None]] = []
            try:
                await self._start_all()
                keepers += [group.create_task(self._keep(s), name=f"envs.slot_{s.index}") for s in self._slots]
                yield self
            except BaseException as error:  # raised again below: the task group would wrap it
                failure = error
            finally:
                for keeper in keepers:
                    keeper.cancel()
        # A keeper that was cancelled before it ran, or a failed start, leaves its sandbox here.
        await finish(self._remove_all(), within_s=REMOVE_WITHIN_S, name=f"{self._name}.remove")
        if failure is not None:
            raise failure

    async def acquire(self, deadline: Deadline) -> Lease[S]:
        """Lease a healthy sandbox. Raises `PoolExhaustedError` when none became free in time; the error says why."""
        try:
            async with deadline.limit(f"waiting for the {self._name} pool"):
                await self._permits.acquire()
                return await self._lease_idle_slot()
        except DeadlineExceededError as error:
            hint = f"; the last start failed: {self._last_failure}" if self._last_failure else ""
            raise PoolExhaustedError(
                f"{self._name} pool exhausted: {self.leased} of {self.capacity} are leased, {error}{hint}"
            ) from error

    async def _lease_idle_slot(self) -> Lease[S]:
        """Lease the next idle slot whose sandbox is healthy. Called with a permit; releases it on any error."""
        slot: Slot[S] | None = None
        try:
            while True:
                slot = await self._idle.get()
                if slot.state is not SlotState.IDLE or slot.sandbox is None:
                    slot = None  # it died while idle; its keeper replaces it, and another session may lease it then
                    continue
                slot.move(SlotState.LEASED)
                self.leased += 1
                if await slot.sandbox.is_healthy():
                    return Lease(slot.sandbox, slot, self._release)
                self._log.warning("envs.sandbox_unhealthy", pool=self._name, sandbox=slot.sandbox.name)
                self._return(slot, is_suspect=True)
                slot = None
        except BaseException:
            if slot is not None and slot.state is SlotState.LEASED:
                self._return(slot, is_suspect=False)
            self._permits.release()
            raise

    def _release(self, slot: Slot[S], is_suspect: bool) -> None:
        if slot.state is SlotState.LEASED:  # else the pool has been closed
            self._return(slot, is_suspect=is_suspect)
        self._permits.release()

    def _return(self, slot: Slot[S], *, is_suspect: bool) -> None:
        self.leased -= 1
        slot.is_suspect = is_suspect
        slot.move(SlotState.RETURNED)

    async def _keep(self, slot: Slot[S]) -> None:
        """Clean the sandbox of one slot after each lease, and replace it when needed.

        Takes:  a slot whose sandbox was started.
        Gives:  idle slots, to `acquire`.
        Waits:  for the end of a lease, or for the death of an idle sandbox.
        Ends:   on cancellation; then its sandbox is removed.
        """
        try:
            while True:
                if slot.sandbox is None:
                    slot.sandbox = await self._start_with_retries(slot)
                slot.move(SlotState.IDLE)
                self._idle.put_nowait(slot)
                reason = await self._until_clean_or_unusable(slot)
                if reason is not None:
                    self.replaced += 1
                    self._log.warning(
                        "envs.sandbox_replaced", pool=self._name, sandbox=slot.sandbox.name, reason=reason
                    )
                    sandbox, slot.sandbox = slot.sandbox, None
                    slot.move(SlotState.STARTING)
                    await finish(sandbox.remove(), within_s=REMOVE_WITHIN_S, name=f"{sandbox.name}.remove")
        finally:
            slot.move(SlotState.GONE)
            if slot.sandbox is not None:
                await finish(slot.sandbox.remove(), within_s=REMOVE_WITHIN_S, name=f"{slot.sandbox.name}.remove")

    async def _until_clean_or_unusable(self, slot: Slot[S]) -> str | None:
        """Wait for one lease and clean the sandbox (None), or return why it must be replaced."""
        assert slot.sandbox is not None
        while slot.state is SlotState.IDLE:
            if await self._died_while_idle(slot):
                return "died while idle"
        while slot.state is SlotState.LEASED:
            slot.changed.clear()
            await slot.changed.wait()
        if slot.is_suspect:
            return "released as suspect"
        if not slot.sandbox.is_alive:
            return "died while leased"
        if (held := slot.sandbox.memory_bytes()) > self._limits.max_memory_bytes:
            return f"holds {held >> 20} MiB, more than the {self._limits.max_memory_bytes >> 20} MiB allowed"
        try:
            async with Deadline(CLEAN_WITHIN_S, "clean-up").limit(f"cleaning {slot.sandbox.name}"):
                await slot.sandbox.clean()
        except (EpisodeError, DeadlineExceededError) as error:
            return f"could not be cleaned: {error}"
        return None

    async def _died_while_idle(self, slot: Slot[S]) -> bool:
        assert slot.sandbox is not None
        slot.changed.clear()
        async with asyncio.TaskGroup() as group:
            died = group.create_task(slot.sandbox.died(), name=f"envs.slot_{slot.index}.died")
            leased = group.create_task(slot.changed.wait(), name=f"envs.slot_{slot.index}.leased")
            await asyncio.wait({died, leased}, return_when=asyncio.FIRST_COMPLETED)
            has_died = died.done() and slot.state is SlotState.IDLE
            died.cancel()
            leased.cancel()
        return has_died

    async def _start_with_retries(self, slot: Slot[S]) -> S:
        waits = backoff(max_s=30.0)
        while True:
            try:
                async with self._starting:
                    return await self._start(slot.index)
            except SandboxStartError as error:
                self._last_failure = str(error)
                self._log.warning("envs.sandbox_start_failed", pool=self._name, slot=slot.index, error=str(error))
            await asyncio.sleep(next(waits))

    async def _start_all(self) -> None:
        """Start every slot. Unlike a later replacement, a failure here is an error of configuration and stops the run."""

        async def start(slot: Slot[S]) -> None:
            async with self._starting:
                slot.sandbox = await self._start(slot.index)

        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(start(slot), name=f"envs.slot_{slot.index}.start")
        except* SandboxStartError as errors:
            raise RunError(f"the {self._name} pool does not start: {first_error(errors)}") from first_error(errors)

    async def _remove_all(self) -> None:
        for slot in self._slots:
            if slot.sandbox is not None:
                with suppress(Exception):
                    await slot.sandbox.remove()
