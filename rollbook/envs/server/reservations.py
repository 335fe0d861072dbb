"""Reservations of session slots: a request for N slots gets all N at once or waits in a FIFO queue.

If two groups could each hold half of the slots and wait for the rest, they would deadlock. A reservation is therefore granted for
all of its slots or none, strictly in order, so that small groups do not starve a large one. `SlotQueue` decides and has no clock
and no tasks; `Reservations` waits.
"""

import asyncio
import uuid
from collections import OrderedDict
from typing import NewType

from rollbook.concurrency.clock import Clock
from rollbook.contracts.errors import RunError, TransientError

ReservationId = NewType("ReservationId", str)
# Each waiting client holds a connection. Requests beyond this number are refused at once.
MAX_WAITING = 4096


class CapacityReachedError(TransientError):
    """No slot became free in time."""

    def __init__(self, message: str, *, active: int, capacity: int, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.active = active
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_capacity, (str(self), self.active, self.capacity, self.retry_after_s))


def _unpickle_capacity(message: str, active: int, capacity: int, retry_after_s: float | None) -> CapacityReachedError:
    return CapacityReachedError(message, active=active, capacity=capacity, retry_after_s=retry_after_s)


class PoolTooSmallError(RunError):
    """The request is for more sessions than the server has."""


class UnknownReservationError(RunError):
    """The reservation was never granted, is used up, or has expired."""


class SlotQueue:
    """Slots in use, granted reservations and waiting ones. Each change returns the reservations it granted, in order."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity is {capacity}; it must be at least 1")
        self.capacity = capacity
        self.in_use = 0
        self._granted: dict[ReservationId, int] = {}
        self._waiting: OrderedDict[ReservationId, int] = OrderedDict()

    @property
    def reserved(self) -> int:
        return sum(self._granted.values())

    @property
    def free(self) -> int:
        return self.capacity - self.in_use - self.reserved

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def request(self, reservation: ReservationId, num_slots: int) -> list[ReservationId]:
        """Join the queue. The result contains the reservation itself if it is granted at once."""
        if not 1 <= num_slots <= self.capacity:
            raise ValueError(f"a reservation is for 1 to {self.capacity} slots, not {num_slots}")
        if reservation in self._granted or reservation in self._waiting:
            raise ValueError(f"reservation {reservation} exists already")
        self._waiting[reservation] = num_slots
        return self._grant()

    def claim(self, reservation: ReservationId) -> bool:
        """Use one slot of a granted reservation; False if it has none."""
        left = self._granted.get(reservation)
        if left is None:
            return False
        self.in_use += 1
        if left == 1:
            del self._granted[reservation]
        else:
            self._granted[reservation] = left - 1
        return True

    def has_unclaimed(self, reservation: ReservationId) -> bool:
        return reservation in self._granted

    def cancel(self, reservation: ReservationId) -> list[ReservationId]:
        """Leave the queue, or free the unclaimed slots of a granted reservation. Unknown reservations are ignored."""
        self._waiting.pop(reservation, None)
        self._granted.pop(reservation, None)
        return self._grant()

    def release(self) -> list[ReservationId]:
        """Free one slot in use."""
        if self.in_use == 0:
            raise ValueError("no slot is in use, so none can be released")
        self.in_use -= 1
        return self._grant()

    def _grant(self) -> list[ReservationId]:
        granted: list[ReservationId] = []
        while self._waiting:
            reservation, num_slots = next(iter(self._waiting.items()))
            if num_slots > self.free:
                break  # later, smaller requests must not overtake the first one
            del self._waiting[reservation]
            self._granted[reservation] = num_slots
            granted.append(reservation)
        return granted


class SessionSlot:
    """One slot in use. A second `release` does nothing."""

    def __init__(self, reservations: "Reservations") -> None:
        self._reservations: Reservations | None = reservations

    def release(self) -> None:
        reservations, self._reservations = self._reservations, None
        if reservations is not None:
            reservations.release_slot()


class Reservations:
    """Waits for grants of a `SlotQueue`. A granted reservation that is not claimed within `hold_s` is cancelled."""

    def __init__(self, capacity: int, *, hold_s: float, clock: Clock) -> None:
        self.slots = SlotQueue(capacity)
        self._hold_s = hold_s
        self._clock = clock
        self._waiters: dict[ReservationId, asyncio.Future[None]] = {}
        self._expires: dict[ReservationId, float] = {}

    async def reserve(self, num_slots: int, *, wait_s: float) -> ReservationId:
        """Wait for `num_slots` slots. Raises `PoolTooSmallError`, or `CapacityReachedError` after `wait_s`."""
        if num_slots > self.slots.capacity:
            raise PoolTooSmallError(
                f"{num_slots} sessions were requested, but this server has {self.slots.capacity}; "
                f"request at most {self.slots.capacity}, or start the server with a pool of at least {num_slots}"
            )
        if self.slots.num_waiting >= MAX_WAITING:
            raise self._capacity_error(f"{MAX_WAITING} requests are waiting already")
        reservation = ReservationId(uuid.uuid4().hex)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[reservation] = granted
        self._on_granted(self.slots.request(reservation, num_slots))
        try:
            if not granted.done():
                await asyncio.wait_for(granted, wait_s)
        except TimeoutError:
            self.cancel(reservation)
            raise self._capacity_error(f"{num_slots} did not become free within {wait_s:g} s") from None
        except BaseException:
            self.cancel(reservation)
            raise
        return reservation

    def claim(self, reservation: ReservationId) -> SessionSlot:
        """Use one slot of a granted reservation."""
        if not self.slots.claim(reservation):
            raise UnknownReservationError(
                f"reservation {reservation} was never granted, is used up, or was not claimed within {self._hold_s:g} s; "
                "request a new one"
            )
        if not self.slots.has_unclaimed(reservation):
            self._forget(reservation)
        return SessionSlot(self)

    def cancel(self, reservation: ReservationId) -> None:
        """Free the unclaimed slots of a reservation."""
        self._forget(reservation)
        self._on_granted(self.slots.cancel(reservation))

    def release_slot(self) -> None:
        self._on_granted(self.slots.release())

    def expire(self) -> list[ReservationId]:
        """Cancel reservations that were not claimed in time, and return them."""
        now = self._clock.now()
        expired = [reservation for reservation, until in self._expires.items() if until <= now]
        for reservation in expired:
            self.cancel(reservation)
        return expired

    def _on_granted(self, granted: list[ReservationId]) -> None:
        for reservation in granted:
            self._expires[reservation] = self._clock.now() + self._hold_s
            waiter = self._waiters.pop(reservation, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _forget(self, reservation: ReservationId) -> None:
        self._waiters.pop(reservation, None)
        self._expires.pop(reservation, None)

    def _capacity_error(self, reason: str) -> CapacityReachedError:
        slots = self.slots
        return CapacityReachedError(
            f"all {slots.capacity} sessions of this server are in use or reserved ({reason}); "
            "retry, or start it with a larger pool",
            active=slots.in_use,
            capacity=slots.capacity,
        )
