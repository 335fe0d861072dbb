"""Groups with their outcome, drop reasons and moves; tasks and draws."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.group import (
    MOVES,
    DropKind,
    DropReason,
    GroupId,
    GroupOutcome,
    GroupState,
    PromptGroup,
    SampleOutcome,
    group_id,
    merge_outcomes,
)
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark


def played(
    reward: float | None, *, version: int = 0, solved: bool | None = None, end: EndReason = EndReason.DONE
) -> RolloutSample:
    row = TokenRow.of(token_ids=[1, 5], logprobs=[0.0, -1.0], loss_mask=[False, True], versions=[-1, version])
    return RolloutSample(
        sequences=(row,),
        sampling=SamplingParams(),
        reward=reward,
        invalid_cause="env: lost" if reward is None else None,
        solved=solved,
        finish_reason=end,
        turns=(TurnMark(sequence=0, start=1, end=2),),
    )


def group(*samples: RolloutSample) -> PromptGroup:
    task_id = TaskId("guess-7")
    return PromptGroup(id=group_id(task_id, 3), task_id=task_id, draw=3, samples=samples)


def test_the_id_of_a_group_names_its_task_and_its_draw() -> None:
    assert group_id(TaskId("guess-7"), 3) == GroupId("guess-7@3")


def test_a_group_without_samples_is_rejected() -> None:
    with pytest.raises(ValueError, match="guess-7@3 has no samples"):
        group()


def test_statistics_are_over_the_scorable_samples_only() -> None:
    outcome = group(played(1.0, solved=True), played(0.0, solved=False), played(None, solved=False)).outcome(
        seconds=2.5
    )
    assert (outcome.num_samples, outcome.num_scorable) == (3, 2)
    assert outcome.reward_mean == pytest.approx(0.5)
    assert outcome.reward_std == pytest.approx(0.5**0.5)
    assert outcome.solved_rate == pytest.approx(0.5)


def test_a_group_without_scorable_samples_has_no_reward_instead_of_zero() -> None:
    outcome = group(played(None), played(None)).outcome(seconds=1.0, invalid_causes={"env: lost": 2})
    assert (outcome.reward_mean, outcome.reward_std, outcome.solved_rate) == (None, None, None)
    assert outcome.invalid_causes == {"env: lost": 2}


def test_one_scorable_sample_has_a_mean_and_no_spread() -> None:
    outcome = group(played(0.25)).outcome(seconds=1.0)
    assert (outcome.reward_mean, outcome.reward_std) == (0.25, None)


def test_the_outcome_contains_truncation_turns_and_response_tokens() -> None:
    outcome = group(played(0.0, end=EndReason.MAX_TURNS), played(1.0)).outcome(seconds=1.0)
    assert (outcome.truncated_rate, outcome.mean_turns, outcome.mean_response_tokens) == (0.5, 1.0, 1.0)


def test_the_outcome_describes_each_sample() -> None:
    late = replace(played(None, end=EndReason.TIME), started_at=10.0, ended_at=12.5)
    outcome = group(played(1.0, solved=True), late).outcome(seconds=3.0)
    assert outcome.samples == (
        SampleOutcome(reward=1.0, solved=True, tokens=1, turns=1, end=EndReason.DONE),
        SampleOutcome(reward=None, solved=None, tokens=1, turns=1, end=EndReason.TIME, started_at=10.0, seconds=2.5),
    )
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=GroupOutcome) == outcome


def test_an_outcome_recorded_without_samples_is_read() -> None:
    outcome = group(played(1.0)).outcome(seconds=3.0)
    old = {name: value for name, value in msgspec.to_builtins(outcome).items() if name != "samples"}
    assert msgspec.convert(old, GroupOutcome).samples == ()


PLAYED = st.lists(
    st.builds(played, st.none() | st.floats(-5, 5), solved=st.none() | st.booleans(), end=st.sampled_from(EndReason)),
    min_size=1,
    max_size=5,
)


@given(PLAYED, PLAYED)
def test_the_merged_outcome_of_two_parts_is_that_of_all_their_samples(
    first: list[RolloutSample], second: list[RolloutSample]
) -> None:
    merged = merge_outcomes(group(*first).outcome(seconds=1), group(*second).outcome(seconds=1))
    whole = group(*first, *second).outcome(seconds=1)
    assert merged.samples == whole.samples
    for name in ("num_scorable", "reward_mean", "reward_std", "solved_rate", "truncated_rate", "mean_response_tokens"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), abs=1e-6), name


def test_only_scorable_samples_count_for_the_trained_publications() -> None:
    mixed = group(played(1.0, version=4), played(0.0, version=6), played(None, version=1))
    assert mixed.trained_publications() == {4, 6}


@given(kind=st.sampled_from(DropKind), detail=st.text())
def test_a_drop_reason_is_parsed_as_it_was_written(kind: DropKind, detail: str) -> None:
    reason = DropReason(kind, detail)
    assert DropReason.parse(str(reason)) == reason


@pytest.mark.parametrize("text", ["", "no such kind", "bored: of it", "stale:no space"])
def test_a_text_that_is_not_a_drop_reason_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        DropReason.parse(text)


def test_every_state_has_moves_except_durable_and_dropped() -> None:
    assert set(MOVES) == set(GroupState)
    assert {state for state, moves in MOVES.items() if not moves} == {GroupState.DURABLE, GroupState.DROPPED}


def test_a_batched_group_cannot_be_dropped() -> None:
    reachable = {GroupState.BATCHED}
    while more := {after for state in reachable for after in MOVES[state]} - reachable:
        reachable |= more
    assert GroupState.DROPPED not in reachable


def test_a_rollout_that_changes_its_row_changes_only_its_copy() -> None:
    task = Task(id=TaskId("t"), row={"numbers": [1, 2]})
    task.row_copy()["numbers"].append(3)
    assert task.row == {"numbers": [1, 2]}


@pytest.mark.parametrize(("task_id", "message"), [("", "must not be empty"), ("a@b", "contains '@'")])
def test_a_task_id_that_is_empty_or_contains_an_at_sign_is_rejected(task_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task(id=TaskId(task_id))


@pytest.mark.parametrize(("number", "position"), [(-1, 0), (0, -1)])
def test_a_draw_with_a_negative_number_or_position_is_rejected(number: int, position: int) -> None:
    with pytest.raises(ValueError, match="both must be >= 0"):
        Draw(task_id=TaskId("t"), number=number, position=position)
