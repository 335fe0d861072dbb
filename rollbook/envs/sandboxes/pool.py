"""A pool of sandboxes: each serves one session at a time, starts clean, and is replaced when it dies or leaks.

`size` sandboxes can be lent at the same time; `spares` more stand ready, so that a death or a slow clean-up costs nobody a wait.
Who waits is served in the order of asking. What a slot goes through is the table below; one task keeps each slot and owns its
sandbox from start to removal, so there is one place that could leak one, and it has a `finally`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.exception_groups import first_error
from rollbook.concurrency.retry import backoff
from rollbook.concurrency.shield import finish
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.envs.sandboxes.orphans import sweep_orphans
from rollbook.envs.sandboxes.sandbox import Sandbox, SandboxStartError
from rollbook.telemetry.events import EventLog

S = TypeVar("S", bound=Sandbox)

REMOVE_WITHIN_S = 20.0
CLEAN_WITHIN_S = 20.0
# Starting is processor work; more at once than cores would only make each slower. Two, since part of it is waiting.
STARTS_AT_ONCE = max(2, os.cpu_count() or 2)


class PoolExhaustedError(TransientError, RuntimeError):
    """Every sandbox is lent. A `RuntimeError` too: the pools this one follows raised that."""


class DoubleReleaseError(RuntimeError):
    """A lease was given back twice: by then the sandbox may serve somebody else."""


class SlotState(StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    LENT = "lent"
    RETURNED = "returned"
    GONE = "gone"


MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.STARTING: frozenset({SlotState.IDLE, SlotState.GONE}),
    SlotState.IDLE: frozenset({SlotState.LENT, SlotState.STARTING, SlotState.GONE}),
    SlotState.LENT: frozenset({SlotState.RETURNED, SlotState.GONE}),
    SlotState.RETURNED: frozenset({SlotState.IDLE, SlotState.STARTING, SlotState.GONE}),
    SlotState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How many to keep, and when one is too big to be used again."""

    size: int
    spares: int = 0
    max_memory_bytes: int = 1 << 62

    def __post_init__(self) -> None:
        if self.size < 1 or self.spares < 0:
            raise ValueError(
                f"a pool of {self.size} with {self.spares} spares: at least 1, and spares are not negative"
            )


class Slot(Generic[S]):
    """One place of the pool; `index` stays while sandboxes come and go."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = SlotState.STARTING
        self.sandbox: S | None = None
        self.is_suspect = False
        self.changed = asyncio.Event()

    def move(self, to: SlotState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"slot {self.index} cannot go from {self.state} to {to}")
        self.state = to
        self.changed.set()


class Lease(Generic[S]):
    """A sandbox that nobody else holds. `release()` once, from anywhere; it does not wait."""

    def __init__(self, sandbox: S, slot: Slot[S], give_back: Callable[[Slot[S], bool], None]) -> None:
        self.sandbox = sandbox
        self._slot = slot
        self._give_back: Callable[[Slot[S], bool], None] | None = give_back

    @property
    def slot_index(self) -> int:
        return self._slot.index

    def release(self, *, is_suspect: bool = False) -> None:
        """Give it back. `is_suspect`: do not clean it, replace it. Raises `DoubleReleaseError` the second time."""
        if self._give_back is None:
            raise DoubleReleaseError(
                f"{self.sandbox.name} was given back already; a lease ends once, and a sandbox may have a new holder"
            )
        give_back, self._give_back = self._give_back, None
        give_back(self._slot, is_suspect)


class SandboxPool(Generic[S]):
    """Keeps sandboxes that `start(slot index)` makes. Use `async with pool.open():`; inside it every slot was ready once."""

    def __init__(
        self,
        *,
        name: str,
        limits: PoolLimits,
        start: Callable[[int], Awaitable[S]],
        log: EventLog,
        clock: Clock | None = None,
    ) -> None:
        self._name = name
        self._limits = limits
        self._start = start
        self._log = log
        self._clock = clock or SystemClock()
        self._slots = [Slot[S](index) for index in range(limits.size + limits.spares)]
        # Unbounded, and never longer than twice the slots: a slot is put in when it becomes idle, and taken out by who waits.
        self._idle: asyncio.Queue[Slot[S]] = asyncio.Queue()
        self._permits = asyncio.Semaphore(limits.size)
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._last_failure = ""
        self.lent = 0
        self.replaced = 0

    @property
    def capacity(self) -> int:
        return self._limits.size

    @property
    def states(self) -> list[SlotState]:
        return [slot.state for slot in self._slots]

    @property
    def sandboxes(self) -> list[S]:
        """Those that are there now, in the order of their slots; for looking, never for use without a lease."""
        return [slot.sandbox for slot in self._slots if slot.sandbox is not None]

    @property
    def memory_bytes(self) -> int:
        return sum(sandbox.memory_bytes() for sandbox in self.sandboxes)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["SandboxPool[S]"]:
        """Sweep what a killed server left, start every slot, and take everything away at the end. Raises `RunError`."""
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
            except BaseException as error:  # raised again below: a task group would wrap what the body raised
                failure = error
            finally:
                for keeper in keepers:
                    keeper.cancel()
        # A keeper that was cancelled before its first turn, or a start that failed half-way, leaves a sandbox to us.
        await finish(self._remove_all(), within_s=REMOVE_WITHIN_S, name=f"{self._name}.remove")
        if failure is not None:
            raise failure

    async def acquire(self, deadline: Deadline) -> Lease[S]:
        """A sandbox that answers. Raises `PoolExhaustedError` when none came free in time; the error says why."""
        try:
            async with deadline.limit(f"waiting for the {self._name} pool"):
                await self._permits.acquire()
                return await self._well_slot()
        except DeadlineExceededError as error:
            hint = f"; the last start failed: {self._last_failure}" if self._last_failure else ""
            raise PoolExhaustedError(
                f"{self._name} pool exhausted: {self.lent} of {self.capacity} are lent, {error}{hint}"
            ) from error

    async def acquire_now(self) -> Lease[S]:
        """The form that does not wait for others: raises `PoolExhaustedError` when all are lent."""
        if self._permits.locked():
            raise PoolExhaustedError(f"{self._name} pool exhausted: all {self.capacity} are lent")
        return await self.acquire(Deadline(CLEAN_WITHIN_S, f"{self._name} slot", clock=self._clock))

    async def _well_slot(self) -> Lease[S]:
        """With a permit in hand: the next idle slot that answers. Gives the permit back when it is cancelled."""
        slot: Slot[S] | None = None
        try:
            while True:
                slot = await self._idle.get()
                if slot.state is not SlotState.IDLE or slot.sandbox is None:
                    continue  # it died while it waited, and its keeper is making a new one
                slot.move(SlotState.LENT)
                self.lent += 1
                if await slot.sandbox.is_well():
                    return Lease(slot.sandbox, slot, self._give_back)
                self._log.warning("envs.sandbox_unwell", pool=self._name, sandbox=slot.sandbox.name)
                self._return(slot, is_suspect=True)
                slot = None
        except BaseException:
            if slot is not None and slot.state is SlotState.LENT:
                self._return(slot, is_suspect=False)
            self._permits.release()
            raise

    def _give_back(self, slot: Slot[S], is_suspect: bool) -> None:
        if slot.state is SlotState.LENT:  # else the pool was closed meanwhile
            self._return(slot, is_suspect=is_suspect)
        self._permits.release()

    def _return(self, slot: Slot[S], *, is_suspect: bool) -> None:
        self.lent -= 1
        slot.is_suspect = is_suspect
        slot.move(SlotState.RETURNED)

    async def _keep(self, slot: Slot[S]) -> None:
        """Keep one slot: lend, clean, replace.

        Takes:  a slot whose sandbox was started.
        Gives:  idle slots, to whoever acquires.
        Waits:  for the slot to be lent and given back, or for its sandbox to die.
        Woken:  by `release`, by the end of a process.
        Ends:   on cancellation; then its sandbox is removed.
        """
        try:
            while True:
                if slot.sandbox is None:
                    slot.sandbox = await self._started(slot)
                slot.move(SlotState.IDLE)
                self._idle.put_nowait(slot)
                reason = await self._until_it_needs_care(slot)
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

    async def _until_it_needs_care(self, slot: Slot[S]) -> str | None:
        """Returns when the sandbox is clean again (None), or why it must be replaced."""
        assert slot.sandbox is not None
        while slot.state is SlotState.IDLE:
            if await self._died_before_it_was_lent(slot):
                return "died while idle"
        while slot.state is SlotState.LENT:
            slot.changed.clear()
            await slot.changed.wait()
        if slot.is_suspect:
            return "given back as suspect"
        if not slot.sandbox.is_alive:
            return "died while lent"
        if (held := slot.sandbox.memory_bytes()) > self._limits.max_memory_bytes:
            return f"holds {held >> 20} MiB, more than the {self._limits.max_memory_bytes >> 20} MiB allowed"
        try:
            async with Deadline(CLEAN_WITHIN_S, "clean-up", clock=self._clock).limit(f"cleaning {slot.sandbox.name}"):
                await slot.sandbox.clean()
        except (EpisodeError, DeadlineExceededError) as error:
            return f"could not be cleaned: {error}"
        return None

    async def _died_before_it_was_lent(self, slot: Slot[S]) -> bool:
        assert slot.sandbox is not None
        slot.changed.clear()
        async with asyncio.TaskGroup() as group:
            died = group.create_task(slot.sandbox.died(), name=f"envs.slot_{slot.index}.died")
            lent = group.create_task(slot.changed.wait(), name=f"envs.slot_{slot.index}.lent")
            await asyncio.wait({died, lent}, return_when=asyncio.FIRST_COMPLETED)
            has_died = died.done() and slot.state is SlotState.IDLE
            died.cancel()
            lent.cancel()
        return has_died

    async def _started(self, slot: Slot[S]) -> S:
        waits = backoff(most_s=30.0)
        while True:
            try:
                async with self._starting:
                    return await self._start(slot.index)
            except SandboxStartError as error:
                self._last_failure = str(error)
                self._log.warning("envs.sandbox_start_failed", pool=self._name, slot=slot.index, error=str(error))
            await self._clock.sleep(next(waits))

    async def _start_all(self) -> None:
        """Every slot once, or nothing: at the opening a slot that does not start is a person's business."""

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
