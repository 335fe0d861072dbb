"""The selection-bias audit: its statistic, and when it warns."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.admission import PastDraw
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.task import TaskId
from rollbook.rollout.dispatch.selection_bias import (
    MIN_GROUPS,
    MaskedSample,
    PlayedGroup,
    SelectionAudit,
    compare,
    compare_masked,
    ks_distance,
    masked_by_length,
    masked_by_position,
)

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(samples, samples)
def test_the_distance_is_symmetric_bounded_and_equal_to_its_definition(a: list[float], b: list[float]) -> None:
    distance = ks_distance(a, b)
    assert distance == ks_distance(b, a)
    assert 0.0 <= distance <= 1.0
    by_hand = max(abs(sum(x <= at for x in a) / len(a) - sum(x <= at for x in b) / len(b)) for at in [*a, *b])
    assert abs(distance - by_hand) < 1e-12


@given(samples)
def test_the_distance_is_0_for_equal_samples_and_1_for_disjoint_ones(a: list[float]) -> None:
    assert ks_distance(a, a) == 0.0
    assert ks_distance(a, [x + 3e6 for x in a]) == 1.0


@given(samples, samples, st.floats(0.1, 100), st.floats(-1e3, 1e3))
def test_the_distance_does_not_depend_on_the_unit(a: list[float], b: list[float], scale: float, shift: float) -> None:
    a, b = [round(x, 2) for x in a], [round(x, 2) for x in b]
    scaled = ks_distance(np.array(a) * 2.0**3, np.array(b) * 2.0**3)
    assert abs(scaled - ks_distance(a, b)) < 1e-12


def played(rng: random.Random, *, slow_lost: float) -> list[PlayedGroup]:
    """Groups whose slow half is lost with this probability."""
    found = []
    for _ in range(400):
        seconds = rng.expovariate(1.0)
        is_lost = rng.random() < (slow_lost if seconds > 0.7 else 0.02)
        found.append(
            PlayedGroup(tokens=rng.gauss(100, 20), seconds=seconds, reward=rng.random(), is_trained=not is_lost)
        )
    return found


def test_losing_slow_groups_is_a_warning_and_random_loss_is_not() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        biased = compare(played(rng, slow_lost=0.6))
        assert "seconds" in {bias.measure for bias in biased.warnings}
        assert "less" in str(biased.warnings[0])
        rng = random.Random(seed)
        fair = compare([PlayedGroup(seconds=rng.random(), is_trained=rng.random() < 0.7) for _ in range(400)])
        assert fair.warnings == ()


def test_groups_dropped_by_a_filter_are_not_a_bias() -> None:
    rng = random.Random(1)
    kept = [PlayedGroup(seconds=1.0, reward=rng.random(), is_trained=True) for _ in range(100)]
    filtered = [PlayedGroup(seconds=1.0, reward=0.0, is_trained=False, is_filtered=True) for _ in range(200)]
    report = compare([*kept, *filtered])
    assert report.warnings == ()
    assert (report.dispatched, report.left_out_share) == (100, 0.0)


def test_too_few_groups_give_no_result() -> None:
    few = [PlayedGroup(seconds=float(i), is_trained=i < MIN_GROUPS - 1) for i in range(100)]
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


def test_the_audit_keeps_a_window_and_uses_the_states_of_the_ledger() -> None:
    audit = SelectionAudit(window=100)
    for number in range(150):
        gid = GroupId(f"t{number}@0")
        if number % 2:
            audit.add_settled(gid, tokens=10.0, seconds=1.0 + number / 1000, reward=0.5, is_filtered=False)
        else:
            audit.add_released(gid, seconds=30.0)
    assert audit.report().dispatched == 0, "the ledger has not decided yet"
    audit.update(past(n, GroupState.DURABLE if n % 2 else GroupState.DROPPED) for n in range(150))
    report = audit.report()
    assert (report.dispatched, report.trained, report.left_out_share) == (100, 50, 0.5)
    assert [bias.measure for bias in report.warnings] == ["seconds"]


def test_rows_of_the_ledger_become_played_groups() -> None:
    outcome = {"num_samples": 4, "mean_response_tokens": 12.0, "seconds": 3.0, "reward_mean": None}
    assert PlayedGroup.from_ledger(outcome, state="durable", drop_reason=None).is_trained
    assert PlayedGroup.from_ledger(outcome, state="queued", drop_reason=None).is_trained is None
    assert PlayedGroup.from_ledger(outcome, state="dropped", drop_reason="filtered: constant_reward").is_filtered
    assert PlayedGroup.from_ledger({}, state="dropped", drop_reason="attempts: deadline") == PlayedGroup(
        is_trained=False
    )


@given(st.lists(st.integers(1, 100), min_size=MIN_GROUPS, max_size=60), st.integers(2, 5))
def test_masking_every_sample_alike_is_not_a_bias(lengths: list[int], factor: int) -> None:
    samples = [MaskedSample(trainable=length * factor, trained=length, reward=length % 2) for length in lengths]
    assert [bias.measure for bias in compare_masked(samples)] == ["tokens", "reward"], "their duration is not known"
    assert all(bias.distance < 1e-9 for bias in compare_masked(samples))


def test_masking_the_tokens_of_long_samples_is_a_bias() -> None:
    short = [MaskedSample(trainable=10, trained=10, seconds=1.0, reward=1.0)] * 50
    long = [MaskedSample(trainable=40, trained=10, seconds=9.0, reward=0.0)] * 50
    tokens, seconds, reward = compare_masked([*short, *long])
    assert all(bias.is_biased for bias in (tokens, seconds, reward))
    assert abs(tokens.distance - 0.3) < 1e-9, "long samples have 4/5 of the tokens and 1/2 of the trained ones"
    assert (tokens.dispatched_mean, tokens.trained_mean) == (34.0, 25.0)
    assert compare_masked(short[: MIN_GROUPS - 1]) == ()


def test_the_report_tells_which_positions_and_which_lengths_are_masked() -> None:
    """Slow episodes of 8 tokens lost their first half; short ones lost nothing."""
    is_masked = np.arange(8) < 4
    slow = [MaskedSample(trainable=8, trained=4, masked_at=is_masked)] * 2
    short = [MaskedSample(trainable=4, trained=4, masked_at=np.zeros(4, dtype=np.bool_))] * 6
    by_position = masked_by_position([*slow, *short])
    assert by_position == [4 / 10, 4 / 10, 0.0, 0.0], (
        "2 of 8 tokens of each slow episode are in a quarter, 1 of 4 of a short one"
    )
    assert masked_by_length([*slow, *short]) == [0.0, 0.0, 0.0, 0.5]
    assert masked_by_position([]) == [0.0] * 4 == masked_by_length([])
