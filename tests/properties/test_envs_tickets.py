"""Places are given out whole, in order, and never more than there are: whatever clients do."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollbook.concurrency.clock import ManualClock
from rollbook.envs.pools.reservations import (
    CapacityReachedError,
    PoolTooSmallError,
    SlotBook,
    TicketId,
    Tickets,
    UnknownTicketError,
)

CAPACITY = 6


class Places(RuleBasedStateMachine):
    """A book against a model that keeps the queue as a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SlotBook(CAPACITY)
        self.queue: list[tuple[TicketId, int]] = []
        self.granted: dict[TicketId, int] = {}
        self.taken = 0
        self.count = 0

    def expect(self, told: list[TicketId]) -> None:
        granted = []
        while self.queue and self.queue[0][1] <= CAPACITY - self.taken - sum(self.granted.values()):
            ticket, places = self.queue.pop(0)
            self.granted[ticket] = places
            granted.append(ticket)
        assert told == granted

    @rule(places=st.integers(1, CAPACITY))
    def ask(self, places: int) -> None:
        self.count += 1
        ticket = TicketId(f"t{self.count}")
        self.queue.append((ticket, places))
        self.expect(self.book.ask(ticket, places))

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([*self.granted, TicketId("unknown")]))
        known = ticket in self.granted
        assert self.book.claim(ticket) is known
        if known:
            self.taken += 1
            self.granted[ticket] -= 1
            if self.granted[ticket] == 0:
                del self.granted[ticket]

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([*self.granted, *(t for t, _ in self.queue), TicketId("unknown")]))
        self.granted.pop(ticket, None)
        self.queue = [(t, n) for t, n in self.queue if t != ticket]
        self.expect(self.book.drop(ticket))

    @rule()
    def release(self) -> None:
        if self.taken:
            self.taken -= 1
            self.expect(self.book.release())

    @invariant()
    def never_more_than_there_are(self) -> None:
        assert self.book.taken == self.taken
        assert self.book.reserved == sum(self.granted.values())
        assert self.book.taken + self.book.reserved + self.book.free == CAPACITY
        assert self.book.free >= 0

    @invariant()
    def whoever_is_first_waits_only_for_lack_of_places(self) -> None:
        if self.queue:
            assert self.queue[0][1] > self.book.free


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPlaces = Places.TestCase


def test_a_place_that_nobody_took_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match="nobody had taken"):
        SlotBook(2).release()


async def test_two_groups_that_need_more_than_half_each_play_one_after_the_other() -> None:
    tickets = Tickets(8, hold_s=30, clock=ManualClock())
    played: list[str] = []

    async def play(name: str) -> None:
        ticket = await tickets.take(6, wait_s=30)
        places = [tickets.claim(ticket.id) for _ in range(6)]
        await asyncio.sleep(0)
        played.append(name)
        for place in places:
            place.release()

    await asyncio.gather(*(play(name) for name in "abcd"))
    assert played == ["a", "b", "c", "d"]
    assert tickets.book.free == 8


async def test_small_groups_do_not_overtake_a_large_one_that_waits() -> None:
    tickets = Tickets(4, hold_s=30, clock=ManualClock())
    holder = tickets.claim((await tickets.take(1, wait_s=0)).id)
    large = asyncio.ensure_future(tickets.take(4, wait_s=30))
    await asyncio.sleep(0)
    with pytest.raises(CapacityReachedError, match="all 4 sessions"):
        await tickets.take(1, wait_s=0)
    holder.release()
    assert (await large).places == 4


async def test_more_places_than_there_are_is_an_error_that_names_both_numbers() -> None:
    with pytest.raises(PoolTooSmallError, match=r"9 sessions .* has 8"):
        await Tickets(8, hold_s=30, clock=ManualClock()).take(9, wait_s=0)


async def test_a_wait_that_is_cancelled_or_over_leaves_nothing_behind() -> None:
    tickets = Tickets(2, hold_s=30, clock=ManualClock())
    held = await tickets.take(2, wait_s=0)
    waiting = asyncio.ensure_future(tickets.take(2, wait_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(CapacityReachedError):
        await tickets.take(1, wait_s=0)
    tickets.drop(held.id)  # granted to the one that is being cancelled: it must give the places back
    await asyncio.gather(waiting, return_exceptions=True)
    assert (tickets.book.free, tickets.book.num_waiting) == (2, 0)


async def test_places_that_nobody_claims_go_to_the_next_and_a_late_claim_is_refused() -> None:
    clock = ManualClock()
    tickets = Tickets(2, hold_s=30, clock=clock)
    late = await tickets.take(2, wait_s=0)
    place = tickets.claim(late.id)
    following = asyncio.ensure_future(tickets.take(1, wait_s=30))
    await asyncio.sleep(0)
    clock.jump(31)
    assert tickets.expire() == [late.id]
    assert tickets.claim((await following).id) is not None
    with pytest.raises(UnknownTicketError, match="ask for a new one"):
        tickets.claim(late.id)
    place.release()
    place.release()
    assert tickets.book.taken == 1
