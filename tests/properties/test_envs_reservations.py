"""Slots are granted all at once, in FIFO order, and never beyond the capacity."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollbook.concurrency.clock import ManualClock
from rollbook.envs.server.reservations import (
    CapacityReachedError,
    PoolTooSmallError,
    ReservationId,
    Reservations,
    SlotQueue,
    UnknownReservationError,
)

CAPACITY = 6


class SlotQueueMachine(RuleBasedStateMachine):
    """A `SlotQueue` against a model that keeps the queue as a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotQueue(CAPACITY)
        self.queue: list[tuple[ReservationId, int]] = []
        self.granted: dict[ReservationId, int] = {}
        self.in_use = 0
        self.count = 0

    def check_granted(self, actual: list[ReservationId]) -> None:
        expected = []
        while self.queue and self.queue[0][1] <= CAPACITY - self.in_use - sum(self.granted.values()):
            reservation, num_slots = self.queue.pop(0)
            self.granted[reservation] = num_slots
            expected.append(reservation)
        assert actual == expected

    @rule(num_slots=st.integers(1, CAPACITY))
    def request(self, num_slots: int) -> None:
        self.count += 1
        reservation = ReservationId(f"r{self.count}")
        self.queue.append((reservation, num_slots))
        self.check_granted(self.slots.request(reservation, num_slots))

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from([*self.granted, ReservationId("unknown")]))
        is_known = reservation in self.granted
        assert self.slots.claim(reservation) is is_known
        if is_known:
            self.in_use += 1
            self.granted[reservation] -= 1
            if self.granted[reservation] == 0:
                del self.granted[reservation]

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = (reservation for reservation, _ in self.queue)
        cancelled = data.draw(st.sampled_from([*self.granted, *waiting, ReservationId("unknown")]))
        self.granted.pop(cancelled, None)
        self.queue = [(reservation, count) for reservation, count in self.queue if reservation != cancelled]
        self.check_granted(self.slots.cancel(cancelled))

    @rule()
    def release(self) -> None:
        if self.in_use:
            self.in_use -= 1
            self.check_granted(self.slots.release())

    @invariant()
    def the_capacity_is_never_exceeded(self) -> None:
        assert self.slots.in_use == self.in_use
        assert self.slots.reserved == sum(self.granted.values())
        assert self.slots.in_use + self.slots.reserved + self.slots.free == CAPACITY
        assert self.slots.free >= 0

    @invariant()
    def the_first_request_waits_only_if_too_few_slots_are_free(self) -> None:
        if self.queue:
            assert self.queue[0][1] > self.slots.free


SlotQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlotQueue = SlotQueueMachine.TestCase


def test_a_slot_that_is_not_in_use_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="no slot is in use"):
        SlotQueue(2).release()


async def test_two_groups_that_need_more_than_half_each_play_one_after_the_other() -> None:
    reservations = Reservations(8, hold_s=30, clock=ManualClock())
    played: list[str] = []

    async def play(name: str) -> None:
        reservation = await reservations.reserve(6, wait_s=30)
        slots = [reservations.claim(reservation) for _ in range(6)]
        await asyncio.sleep(0)
        played.append(name)
        for slot in slots:
            slot.release()

    await asyncio.gather(*(play(name) for name in "abcd"))
    assert played == ["a", "b", "c", "d"]
    assert reservations.slots.free == 8


async def test_small_groups_do_not_overtake_a_waiting_large_group() -> None:
    reservations = Reservations(4, hold_s=30, clock=ManualClock())
    slot = reservations.claim(await reservations.reserve(1, wait_s=0))
    large = asyncio.ensure_future(reservations.reserve(4, wait_s=30))
    await asyncio.sleep(0)
    with pytest.raises(CapacityReachedError, match="all 4 sessions"):
        await reservations.reserve(1, wait_s=0)
    slot.release()
    await large
    assert reservations.slots.reserved == 4


async def test_a_request_beyond_the_capacity_is_refused_with_both_numbers() -> None:
    with pytest.raises(PoolTooSmallError, match=r"9 sessions .* has 8"):
        await Reservations(8, hold_s=30, clock=ManualClock()).reserve(9, wait_s=0)


async def test_a_cancelled_or_expired_wait_leaves_no_reservation_behind() -> None:
    reservations = Reservations(2, hold_s=30, clock=ManualClock())
    held = await reservations.reserve(2, wait_s=0)
    waiting = asyncio.ensure_future(reservations.reserve(2, wait_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(CapacityReachedError):
        await reservations.reserve(1, wait_s=0)
    reservations.cancel(held)  # this grants the slots to the cancelled request, which must free them
    await asyncio.gather(waiting, return_exceptions=True)
    assert (reservations.slots.free, reservations.slots.num_waiting) == (2, 0)


async def test_unclaimed_slots_go_to_the_next_request_and_a_late_claim_is_refused() -> None:
    clock = ManualClock()
    reservations = Reservations(2, hold_s=30, clock=clock)
    late = await reservations.reserve(2, wait_s=0)
    slot = reservations.claim(late)
    following = asyncio.ensure_future(reservations.reserve(1, wait_s=30))
    await asyncio.sleep(0)
    clock.jump(31)
    assert reservations.expire() == [late]
    reservations.claim(await following)
    with pytest.raises(UnknownReservationError, match="request a new one"):
        reservations.claim(late)
    slot.release()
    slot.release()
    assert reservations.slots.in_use == 1
