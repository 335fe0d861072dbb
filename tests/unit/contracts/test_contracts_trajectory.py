"""Token rows and samples are checked at birth: what exists is valid."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import decode_group, encode_group
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark


def row(**changed: Any) -> TokenRow:
    """Prompt, two sampled tokens, an observation."""
    arrays: dict[str, Any] = {
        "token_ids": [1, 7, 8, 3],
        "logprobs": [0.0, -0.5, -1.5, 0.0],
        "loss_mask": [False, True, True, False],
        "versions": [-1, 4, 5, -1],
    }
    return TokenRow.of(**(arrays | changed))


def sample(**changed: Any) -> RolloutSample:
    parts: dict[str, Any] = {"sequences": (row(),), "sampling": SamplingParams(), "reward": 1.0}
    return RolloutSample(**(parts | changed))


def test_a_row_knows_its_length_its_trained_tokens_and_their_publications() -> None:
    assert len(row()) == 4
    assert row().num_trained == 2
    assert row().trained_publications() == {4, 5}
    assert row().token_ids.dtype == np.int32


def test_an_unknown_publication_of_a_trained_token_is_reported() -> None:
    assert row(versions=[-1, -1, 5, -1]).trained_publications() == {-1, 5}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids": [1, 7, 8]}, "3 ids, 4 logprobs, 4 loss mask, 4 versions"),
        ({"versions": [-1, 4]}, "2 versions"),
        ({"token_ids": [], "logprobs": [], "loss_mask": [], "versions": []}, "empty"),
        ({"token_ids": [1, -7, 8, 3]}, "negative token id at position 1"),
        ({"versions": [-1, 4, -2, -1]}, "version below -1 at position 2"),
        ({"loss_mask": [True, True, True, False]}, "first token cannot be trained"),
        ({"logprobs": [0.0, -0.5, 0.4, 0.0]}, r"logprob 0\.4\d* at position 2"),
        ({"logprobs": [0.0, -math.inf, -0.5, 0.0]}, "logprob -inf at position 1"),
        ({"token_ids": [[1, 7], [8, 3]]}, "one-dimensional array"),
        ({"weights": [0, 1, 1]}, r"weights must be float32 of shape \(4,\)"),
        ({"weights": [0, 1, -0.5, 0]}, r"weights has -0\.5 at position 2"),
        ({"weights": [0, math.nan, 1, 0]}, "weights has nan at position 1"),
        ({"advantages": [0, math.inf, 1, 0]}, "advantages has inf at position 1"),
        ({"reference_logprobs": [0, 0.5, -1, 0]}, r"reference_logprobs has 0\.5 at position 1"),
    ],
)
def test_an_invalid_row_is_rejected_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**changed)


def test_arrays_of_another_dtype_are_rejected() -> None:
    valid = row()
    with pytest.raises(ValueError, match="token_ids must be a one-dimensional array of int32, got int64"):
        TokenRow(
            token_ids=valid.token_ids.astype("int64"),
            logprobs=valid.logprobs,
            loss_mask=valid.loss_mask,
            versions=valid.versions,
        )


def test_a_logprob_slightly_above_zero_is_accepted() -> None:
    assert row(logprobs=[0.0, 1e-4, -1.5, 0.0]).has_logprobs


def test_only_unknown_logprobs_of_trained_tokens_matter() -> None:
    assert not row(logprobs=[0.0, math.nan, -1.5, 0.0]).has_logprobs
    assert row(logprobs=[math.nan, -0.5, -1.5, math.nan]).has_logprobs


@given(
    lengths=st.tuples(*(st.integers(0, 6) for _ in range(4))),
    trains_first=st.booleans(),
)
def test_a_row_is_accepted_exactly_when_its_arrays_agree(lengths: tuple[int, ...], trains_first: bool) -> None:
    ids, logprobs, num_mask, versions = lengths
    mask = [trains_first, *([True] * 5)][:num_mask]
    is_valid = len(set(lengths)) == 1 and ids > 0 and not trains_first
    try:
        built = TokenRow.of(token_ids=[1] * ids, logprobs=[-1.0] * logprobs, loss_mask=mask, versions=[0] * versions)
    except ValueError:
        assert not is_valid
    else:
        assert is_valid
        assert built.num_trained == ids - 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequences": ()}, "at least one sequence"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": math.inf}, "reward is inf"),
        ({"reward": None}, "needs an invalid_cause"),
        ({"invalid_cause": "env: connection lost"}, "cannot be invalid"),
        ({"sequences": (row(loss_mask=[False] * 4),)}, "at least one trained token"),
        ({"turns": (TurnMark(sequence=0, start=1, end=5),)}, "outside the sample's sequences"),
        ({"turns": (TurnMark(sequence=1, start=0, end=1),)}, "outside the sample's sequences"),
    ],
)
def test_an_invalid_sample_is_rejected_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**changed)


def test_an_infrastructure_failure_has_no_reward() -> None:
    broken = sample(reward=None, invalid_cause="env: connection lost", sequences=(row(loss_mask=[False] * 4),))
    assert not broken.is_scorable
    assert broken.reward is None


def test_a_forked_sample_counts_the_tokens_of_all_its_sequences() -> None:
    forked = sample(sequences=(row(), row()))
    assert (forked.num_tokens, forked.num_trained) == (8, 4)


def test_every_end_reason_except_done_is_truncated() -> None:
    assert [reason for reason in EndReason if not reason.is_truncated] == [EndReason.DONE]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_k", -1)],
)
def test_invalid_sampling_parameters_are_rejected_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # a float where an int is due is part of the table


def test_a_completion_whose_arrays_differ_in_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 logprobs, 2 versions"):
        Completion(
            token_ids=np.array([1, 2], np.int32),
            logprobs=np.array([-1.0], np.float32),
            versions=np.array([0, 0], np.int32),
            finish_reason=FinishReason.LENGTH,
        )


def test_a_flat_sample_is_made_from_parallel_lists() -> None:
    flat = RolloutSample([1, 7, 8], [0.0, -0.5, -1.0], [0, 1, 1], 0.5, versions=[-1, 4, 4], finish_reason="length")
    (only,) = flat.sequences
    assert (only.loss_mask.tolist(), only.versions.tolist(), only.weights) == ([False, True, True], [-1, 4, 4], None)
    assert (flat.reward, flat.finish_reason) == (0.5, EndReason.MAX_TOKENS)
    assert RolloutSample([1, 7], [0.0, -0.5], [0, 1], 1.0).sequences[0].trained_publications() == {-1}


def test_a_flat_sample_has_its_three_lists_as_properties() -> None:
    flat = RolloutSample(tokens=[1, 7, 8], logprobs=[0.0, -0.5, -1.0], loss_mask=[0, 1, 1], reward=0.5)
    assert (flat.tokens.tolist(), flat.logprobs.tolist(), flat.loss_mask.tolist()) == (
        [1, 7, 8],
        [0.0, -0.5, -1.0],
        [0, 1, 1],
    )
    weighted = RolloutSample(tokens=[1, 7], logprobs=[0.0, -0.5], loss_mask=[0, 0.5], reward=0.5)
    assert weighted.loss_mask.tolist() == [0.0, 0.5]
    several = RolloutSample(sequences=(*flat.sequences, *weighted.sequences), reward=0.5)
    with pytest.raises(ValueError, match=r"2 sequences.*read them from .sequences"):
        several.tokens  # noqa: B018


def test_a_sample_takes_lists_or_sequences_and_not_both() -> None:
    flat = RolloutSample(tokens=[1, 7], logprobs=[0.0, -0.5], loss_mask=[0, 1], reward=0.5)
    with pytest.raises(ValueError, match="not both"):
        RolloutSample(tokens=[1, 7], sequences=flat.sequences, reward=0.5)
    with pytest.raises(ValueError, match="needs tokens, logprobs and loss_mask"):
        RolloutSample(tokens=[1, 7], reward=0.5)
    assert dataclasses.replace(flat, reward=1.0).sequences == flat.sequences


def test_the_numbers_of_a_flat_loss_mask_are_weights() -> None:
    (only,) = RolloutSample([1, 7, 8, 9], [0.0, -0.5, -1.0, 0.0], [0, 0.25, 1, 0], 1.0).sequences
    assert only.loss_mask.tolist() == [False, True, True, False]
    assert only.weights is not None
    assert only.weights.tolist() == [0, 0.25, 1, 0]


def test_rewards_and_states_of_turns_survive_a_rewritten_history_and_the_frame() -> None:
    rows = tuple(
        TokenRow.of(token_ids=[1, 2, 3, 4], logprobs=[0, -1, 0, -1], loss_mask=[0, 1, 0, 1], versions=[-1, 0, -1, 0])
        for _ in range(2)
    )
    # Turns of a branching history alternate between its sequences.
    marks = tuple(TurnMark(sequence=s, start=at, end=at + 1) for s, at in ((0, 1), (1, 1), (0, 3), (1, 3)))
    plain = RolloutSample(sequences=rows, reward=1.0, turns=marks)
    assert (plain.turn_rewards, plain.turn_states) == (None, None)
    sample = plain.with_turns(rewards=[0.1, 0.2, 0.3, 0.4], states=["a", "b", "a", "c"])
    group = PromptGroup(id=GroupId("t@0"), task_id=TaskId("t"), draw=0, samples=(sample,))
    (decoded,) = decode_group(encode_group(group).payload).samples
    assert decoded.turn_rewards is not None
    assert decoded.turn_states is not None
    assert decoded.turn_rewards.tolist() == [0.1, 0.2, 0.3, 0.4]
    first, second, third, fourth = decoded.turn_states.tolist()
    assert first == third
    assert len({first, second, fourth}) == 3
    with pytest.raises(ValueError, match="turn_rewards has shape \\(3,\\); the sample has 4 turns"):
        plain.with_turns(rewards=[1, 2, 3])
    with pytest.raises(ValueError, match="turn_rewards has nan at position 1"):
        plain.with_turns(rewards=[1, 1, math.nan, 1])
