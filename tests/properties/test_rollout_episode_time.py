"""The clock of an episode: every second is its own or was waited, and none is both."""

import asyncio
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.concurrency.clock import ManualClock
from rollbook.rollout.stopwatch import EpisodeTime, MovableTimeout

seconds = st.integers(0, 100).map(float)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), seconds),
        st.tuples(st.just("wait"), st.just(0.0)),
        st.tuples(st.just("go on"), seconds),
    ),
    max_size=40,
)


@given(moves, st.integers(1, 500).map(float))
def test_every_second_is_either_used_or_waited(steps: list[tuple[str, float]], seconds: float) -> None:
    clock = ManualClock()
    time = EpisodeTime(seconds, clock=clock)
    began, before = clock.now(), 0.0
    waits: list[tuple[ExitStack, float]] = []
    for what, amount in steps:
        if what == "pass":
            clock.jump(amount)
        elif what == "wait":
            stack = ExitStack()
            stack.enter_context(time.waiting())
            waits.append((stack, clock.now()))
        elif waits:
            stack, since = waits.pop()
            with time.waiting() as wait:
                # What was the episode's own doing cannot be longer than the wait itself.
                wait.charge(min(amount, clock.now() - since))
            stack.close()
        assert time.used_s >= before, "time never runs backwards"
        before = time.used_s
        assert time.is_stopped == bool(waits)
        assert 0.0 <= time.left_s <= seconds
        assert time.is_over == (time.used_s >= seconds)
    while waits:
        waits.pop()[0].close()
    assert time.used_s + time.waited_s == clock.now() - began


async def test_a_timeout_that_moves_later_sets_no_new_timer_and_one_that_moves_earlier_is_kept() -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    call_at = loop.call_at

    def counted(when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **options)

    left_s = 3600.0

    async def wait() -> None:
        nonlocal left_s
        async with asyncio.timeout(None) as limit:
            with MovableTimeout(limit, lambda: left_s) as move:
                for _ in range(100):
                    left_s += 1.0
                    move()
                assert len(timers) == 1
                for seconds in (0.01, 0.05):
                    left_s = seconds
                    move()
                moved_at = loop.time()
                try:
                    await asyncio.Event().wait()
                finally:
                    assert loop.time() >= moved_at + 0.05, "the timer of the earlier time does not end the block"

    with patch.object(loop, "call_at", counted), pytest.raises(TimeoutError):
        await wait()
