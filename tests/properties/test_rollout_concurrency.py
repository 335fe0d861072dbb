"""Adaptive concurrency against a simulated engine."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.dispatch.concurrency import ConcurrencyController, Round, RoundMeter


def engine(knee: float, *, noise: float, rng: random.Random) -> Callable[[int], float]:
    """Throughput by groups in flight: rises up to the knee, then stays constant."""

    def throughput(limit: int) -> float:
        return 100.0 * min(limit, knee) * (1.0 + rng.uniform(-noise, noise))

    return throughput


def settle(controller: ConcurrencyController, throughput: Callable[[int], float], rounds: int) -> list[int]:
    limits = []
    for _ in range(rounds):
        limit = controller.limit
        limits.append(limit)
        controller.next_limit(Round(limit=limit, tokens=throughput(limit) * 10, seconds=10.0, was_full=True))
    return limits


@pytest.mark.parametrize("knee", [6, 20, 60])
@pytest.mark.parametrize("start", ["low", "high"])
def test_the_limit_converges_to_the_number_that_keeps_the_engine_busy_from_below_and_above(
    knee: int, start: str
) -> None:
    rng = random.Random(knee)
    controller = ConcurrencyController(least=2, most=256)
    if start == "high":
        controller.limit = 256
    limits = settle(controller, engine(knee, noise=0.02, rng=rng), 60)[-30:]
    mean = sum(limits) / len(limits)
    busy = sum(min(limit, knee) for limit in limits) / (knee * len(limits))
    assert busy >= 0.85, limits
    assert mean <= 1.6 * knee, f"more groups in flight than useful: {limits}"


def test_the_limit_follows_a_change_of_the_engine() -> None:
    rng = random.Random(0)
    controller = ConcurrencyController(least=2, most=256)
    settle(controller, engine(16, noise=0.02, rng=rng), 40)
    raised = settle(controller, engine(80, noise=0.02, rng=rng), 60)[-20:]
    assert min(raised) > 40
    lowered = settle(controller, engine(10, noise=0.02, rng=rng), 60)[-20:]
    assert max(lowered) < 25


def test_a_round_with_another_bottleneck_does_not_change_the_limit() -> None:
    controller = ConcurrencyController(least=4, most=64)
    before = controller.limit
    for _ in range(10):
        assert controller.next_limit(Round(limit=before, tokens=1.0, seconds=1.0, was_full=False)) == before


@given(
    least=st.integers(1, 8),
    extra=st.integers(0, 200),
    tokens=st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=80),
)
def test_the_limit_stays_within_its_bounds(least: int, extra: int, tokens: list[tuple[float, bool]]) -> None:
    controller = ConcurrencyController(least=least, most=least + extra)
    for measured, was_full in tokens:
        limit = controller.next_limit(Round(limit=controller.limit, tokens=measured, seconds=1.0, was_full=was_full))
        assert least <= limit <= least + extra


def test_a_round_ends_after_enough_groups_and_enough_time() -> None:
    meter = RoundMeter(least_s=10.0)
    for number in range(9):
        meter.add_group(tokens=100.0, was_full=number % 4 != 0, now=float(number))
    assert meter.finish_round(limit=4, now=9.0) is None, "too soon"
    done = meter.finish_round(limit=4, now=10.0)
    assert done == Round(limit=4, tokens=800.0, seconds=10.0, was_full=True)
    assert meter.finish_round(limit=4, now=30.0) is None, "the next round starts with its first group"
