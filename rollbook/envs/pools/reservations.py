"""Places on a server, given out whole and in order: who asks for N gets N at once, or waits as one.

Two groups that each took half of the places and waited for the rest would wait for ever. Here a ticket is granted for all its
places or for none, strictly first come first served, so a large group is not starved by small ones either. `SlotBook` decides and
knows no clock and no task; `Tickets` waits.
"""

import asyncio
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import NewType

from rollbook.concurrency.clock import Clock
from rollbook.contracts.errors import RunError, TransientError

TicketId = NewType("TicketId", str)
# Everybody who waits holds a connection; beyond this many a refusal is kinder than a queue that never moves.
MAX_WAITING = 4096


class CapacityReachedError(TransientError):
    """No place came free in time."""

    def __init__(self, message: str, *, active: int, capacity: int, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.active = active
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return (_revive_capacity, (str(self), self.active, self.capacity, self.retry_after_s))


def _revive_capacity(message: str, active: int, capacity: int, retry_after_s: float | None) -> CapacityReachedError:
    return CapacityReachedError(message, active=active, capacity=capacity, retry_after_s=retry_after_s)


class PoolTooSmallError(RunError):
    """More sessions are asked for than the server will ever have: a person must change one of the two numbers."""


class UnknownTicketError(RunError):
    """A connection named a ticket that was never granted, is used up, or has expired."""


class SlotBook:
    """Who holds how many places, and who is next. Every change returns the tickets it granted, in order."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"{capacity} places serve nobody; there must be at least one")
        self.capacity = capacity
        self.taken = 0
        self._granted: dict[TicketId, int] = {}
        self._waiting: OrderedDict[TicketId, int] = OrderedDict()

    @property
    def reserved(self) -> int:
        return sum(self._granted.values())

    @property
    def free(self) -> int:
        return self.capacity - self.taken - self.reserved

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ask(self, ticket: TicketId, places: int) -> list[TicketId]:
        """Join the queue. The ticket itself is in the answer when it is granted at once."""
        if not 1 <= places <= self.capacity:
            raise ValueError(f"a ticket is for 1 to {self.capacity} places, not for {places}")
        if ticket in self._granted or ticket in self._waiting:
            raise ValueError(f"ticket {ticket} exists already")
        self._waiting[ticket] = places
        return self._grant()

    def claim(self, ticket: TicketId) -> bool:
        """Turn one place of a granted ticket into a taken one; False when the ticket has none."""
        left = self._granted.get(ticket)
        if left is None:
            return False
        self.taken += 1
        if left == 1:
            del self._granted[ticket]
        else:
            self._granted[ticket] = left - 1
        return True

    def has_unclaimed(self, ticket: TicketId) -> bool:
        return ticket in self._granted

    def drop(self, ticket: TicketId) -> list[TicketId]:
        """Give up a place in the queue, or the places that a granted ticket has not claimed. Unknown tickets are passed over."""
        self._waiting.pop(ticket, None)
        self._granted.pop(ticket, None)
        return self._grant()

    def release(self) -> list[TicketId]:
        """A taken place is free again."""
        if self.taken == 0:
            raise ValueError("a place was given back that nobody had taken")
        self.taken -= 1
        return self._grant()

    def _grant(self) -> list[TicketId]:
        granted: list[TicketId] = []
        while self._waiting:
            ticket, places = next(iter(self._waiting.items()))
            if places > self.free:
                break  # whoever is first waits; letting smaller ones pass would starve it
            del self._waiting[ticket]
            self._granted[ticket] = places
            granted.append(ticket)
        return granted


class Place:
    """One taken place. Giving it back twice does no harm."""

    def __init__(self, tickets: "Tickets") -> None:
        self._tickets: Tickets | None = tickets

    def release(self) -> None:
        tickets, self._tickets = self._tickets, None
        if tickets is not None:
            tickets.give_back()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    id: TicketId
    places: int


class Tickets:
    """Waiting around a `SlotBook`. A granted ticket that is not claimed within `hold_s` goes back to the queue's next."""

    def __init__(self, capacity: int, *, hold_s: float, clock: Clock) -> None:
        self.book = SlotBook(capacity)
        self.hold_s = hold_s
        self._clock = clock
        self._granted: dict[TicketId, asyncio.Future[None]] = {}
        self._expires: dict[TicketId, float] = {}

    async def take(self, places: int, *, wait_s: float) -> Ticket:
        """A ticket for `places` places. Raises `PoolTooSmallError`, or `CapacityReachedError` when the wait is over."""
        if places > self.book.capacity:
            raise PoolTooSmallError(
                f"{places} sessions were asked for, but this server has {self.book.capacity}; "
                f"ask for at most {self.book.capacity}, or start the server with a pool of at least {places}"
            )
        if self.book.num_waiting >= MAX_WAITING:
            raise self._refusal(f"{MAX_WAITING} others wait already")
        ticket = TicketId(uuid.uuid4().hex)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._granted[ticket] = turn
        self._announce(self.book.ask(ticket, places))
        try:
            if not turn.done():
                await asyncio.wait_for(turn, wait_s)
        except TimeoutError:
            self.drop(ticket)
            raise self._refusal(f"no {places} came free within {wait_s:g} s") from None
        except BaseException:
            self.drop(ticket)
            raise
        return Ticket(id=ticket, places=places)

    def claim(self, ticket: TicketId) -> Place:
        """One place of a granted ticket."""
        if not self.book.claim(ticket):
            raise UnknownTicketError(
                f"ticket {ticket}: it was never granted here, all its places are claimed, or it was not claimed within "
                f"{self.hold_s:g} s; ask for a new one"
            )
        if not self.book.has_unclaimed(ticket):
            self._forget(ticket)
        return Place(self)

    async def place(self, *, wait_s: float) -> Place:
        """One place, for a client that knows nothing of tickets."""
        return self.claim((await self.take(1, wait_s=wait_s)).id)

    def drop(self, ticket: TicketId) -> None:
        """The holder needs what is left of it no more."""
        self._forget(ticket)
        self._announce(self.book.drop(ticket))

    def give_back(self) -> None:
        self._announce(self.book.release())

    def expire(self) -> list[TicketId]:
        """Take back what was granted and not claimed in time."""
        now = self._clock.now()
        late = [ticket for ticket, until in self._expires.items() if until <= now]
        for ticket in late:
            self.drop(ticket)
        return late

    def _announce(self, granted: list[TicketId]) -> None:
        for ticket in granted:
            self._expires[ticket] = self._clock.now() + self.hold_s
            turn = self._granted.pop(ticket, None)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _forget(self, ticket: TicketId) -> None:
        self._granted.pop(ticket, None)
        self._expires.pop(ticket, None)

    def _refusal(self, why: str) -> CapacityReachedError:
        book = self.book
        return CapacityReachedError(
            f"all {book.capacity} sessions of this server are taken or promised ({why}); try again, or start it with a larger pool",
            active=book.taken,
            capacity=book.capacity,
        )
