"""The selection-bias audit: its statistic, when it warns, and when it must not."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.admission import PastDraw
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.task import TaskId
from rollbook.rollout.dispatch.selection_bias import (
    LEAST_GROUPS,
    Played,
    SelectionAudit,
    compare,
    ks_distance,
    played_of,
)

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(samples, samples)
def test_the_distance_is_symmetric_within_bounds_and_that_of_the_definition(a: list[float], b: list[float]) -> None:
    distance = ks_distance(a, b)
    assert distance == ks_distance(b, a)
    assert 0.0 <= distance <= 1.0
    by_hand = max(abs(sum(x <= at for x in a) / len(a) - sum(x <= at for x in b) / len(b)) for at in [*a, *b])
    assert abs(distance - by_hand) < 1e-12


@given(samples)
def test_a_sample_is_at_no_distance_from_itself_and_apart_from_one_beyond_it(a: list[float]) -> None:
    assert ks_distance(a, a) == 0.0
    assert ks_distance(a, [x + 3e6 for x in a]) == 1.0


@given(samples, samples, st.floats(0.1, 100), st.floats(-1e3, 1e3))
def test_the_distance_does_not_depend_on_the_unit(a: list[float], b: list[float], scale: float, shift: float) -> None:
    a, b = [round(x, 2) for x in a], [round(x, 2) for x in b]
    scaled = ks_distance(np.array(a) * 2.0**3, np.array(b) * 2.0**3)
    assert abs(scaled - ks_distance(a, b)) < 1e-12


def played(rng: random.Random, *, slow_lost: float) -> list[Played]:
    """Groups of which the slow half is lost with this probability."""
    found = []
    for _ in range(400):
        seconds = rng.expovariate(1.0)
        is_lost = rng.random() < (slow_lost if seconds > 0.7 else 0.02)
        found.append(Played(tokens=rng.gauss(100, 20), seconds=seconds, reward=rng.random(), is_trained=not is_lost))
    return found


def test_losing_the_slow_ones_is_noticed_and_named_and_fair_losses_are_not() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        biased = compare(played(rng, slow_lost=0.6))
        assert "seconds" in {bias.measure for bias in biased.warnings}
        assert "less" in str(biased.warnings[0])
        rng = random.Random(seed)
        fair = compare([Played(seconds=rng.random(), is_trained=rng.random() < 0.7) for _ in range(400)])
        assert fair.warnings == ()


def test_what_a_filter_dropped_on_purpose_is_no_bias() -> None:
    rng = random.Random(1)
    kept = [Played(seconds=1.0, reward=rng.random(), is_trained=True) for _ in range(100)]
    filtered = [Played(seconds=1.0, reward=0.0, is_trained=False, is_filtered=True) for _ in range(200)]
    report = compare([*kept, *filtered])
    assert report.warnings == ()
    assert (report.dispatched, report.left_out_share) == (100, 0.0)


def test_a_few_groups_say_nothing() -> None:
    few = [Played(seconds=float(i), is_trained=i < LEAST_GROUPS - 1) for i in range(100)]
    assert compare(few).biases == ()


def past(number: int, state: GroupState) -> PastDraw:
    return PastDraw(
        group_id=GroupId(f"t{number}@0"),
        task_id=TaskId(f"t{number}"),
        number=0,
        position=number,
        sequence=number,
        state=state,
        outcome=None,
    )


def test_the_audit_remembers_a_window_and_believes_the_ledger() -> None:
    audit = SelectionAudit(window=100)
    for number in range(150):
        gid = GroupId(f"t{number}@0")
        if number % 2:
            audit.landed(gid, tokens=10.0, seconds=1.0 + number / 1000, reward=0.5, is_filtered=False)
        else:
            audit.given_up(gid, seconds=30.0)
    assert audit.report().dispatched == 0, "nobody has decided yet"
    audit.heard(past(n, GroupState.DURABLE if n % 2 else GroupState.DROPPED) for n in range(150))
    report = audit.report()
    assert (report.dispatched, report.trained, report.left_out_share) == (100, 50, 0.5)
    assert [bias.measure for bias in report.warnings] == ["seconds"]


def test_rows_of_the_ledger_are_read_the_same_way() -> None:
    outcome = {"num_samples": 4, "mean_response_tokens": 12.0, "seconds": 3.0, "reward_mean": None}
    assert played_of(outcome, state="durable", drop_reason=None).is_trained
    assert played_of(outcome, state="queued", drop_reason=None).is_trained is None
    assert played_of(outcome, state="dropped", drop_reason="filtered: constant_reward").is_filtered
    assert played_of({}, state="dropped", drop_reason="attempts: deadline") == Played(is_trained=False)
