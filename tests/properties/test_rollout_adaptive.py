"""Adaptive concurrency against a simulated engine: it finds the number that fills the engine, from either side, and follows it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.dispatch.concurrency import AdaptiveRules, ConcurrencyController, Round, RoundMeter


def engine(knee: float, *, noise: float, rng: random.Random) -> Callable[[int], float]:
    """Throughput by number in flight: it climbs until the engine is full, then stays."""

    def throughput(limit: int) -> float:
        return 100.0 * min(limit, knee) * (1.0 + rng.uniform(-noise, noise))

    return throughput


def settle(controller: ConcurrencyController, throughput: Callable[[int], float], rounds: int) -> list[int]:
    limits = []
    for _ in range(rounds):
        limit = controller.limit
        limits.append(limit)
        controller.after(Round(limit=limit, tokens=throughput(limit) * 10, seconds=10.0, was_full=True))
    return limits


@pytest.mark.parametrize("knee", [6, 20, 60])
@pytest.mark.parametrize("start", ["low", "high"])
def test_it_finds_the_number_that_keeps_the_engine_busy_from_either_side(knee: int, start: str) -> None:
    rng = random.Random(knee)
    controller = ConcurrencyController(AdaptiveRules(least=2, most=256))
    if start == "high":
        controller.limit = 256
    limits = settle(controller, engine(knee, noise=0.02, rng=rng), 60)[-30:]
    mean = sum(limits) / len(limits)
    busy = sum(min(limit, knee) for limit in limits) / (knee * len(limits))
    assert busy >= 0.85, limits
    assert mean <= 1.6 * knee, f"no more in flight than of use: {limits}"


def test_it_follows_when_the_engine_changes() -> None:
    rng = random.Random(0)
    controller = ConcurrencyController(AdaptiveRules(least=2, most=256))
    settle(controller, engine(16, noise=0.02, rng=rng), 40)
    wide = settle(controller, engine(80, noise=0.02, rng=rng), 60)[-20:]
    assert min(wide) > 40
    narrow = settle(controller, engine(10, noise=0.02, rng=rng), 60)[-20:]
    assert max(narrow) < 25


def test_a_round_in_which_something_else_was_the_limit_teaches_nothing() -> None:
    controller = ConcurrencyController(AdaptiveRules(least=4, most=64))
    before = controller.limit
    for _ in range(10):
        assert controller.after(Round(limit=before, tokens=1.0, seconds=1.0, was_full=False)) == before


@given(
    least=st.integers(1, 8),
    extra=st.integers(0, 200),
    tokens=st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=80),
)
def test_it_never_leaves_its_bounds_whatever_is_measured(
    least: int, extra: int, tokens: list[tuple[float, bool]]
) -> None:
    controller = ConcurrencyController(AdaptiveRules(least=least, most=least + extra))
    for measured, was_full in tokens:
        limit = controller.after(Round(limit=controller.limit, tokens=measured, seconds=1.0, was_full=was_full))
        assert least <= limit <= least + extra


def test_a_round_is_over_when_what_is_in_flight_has_turned_over_and_time_has_passed() -> None:
    meter = RoundMeter(least_s=10.0)
    for number in range(9):
        meter.finished(tokens=100.0, was_full=number % 4 != 0, now=float(number))
    assert meter.take(limit=4, now=9.0) is None, "too soon"
    done = meter.take(limit=4, now=10.0)
    assert done == Round(limit=4, tokens=800.0, seconds=10.0, was_full=True)
    assert meter.take(limit=4, now=30.0) is None, "the next round begins with its first group"
