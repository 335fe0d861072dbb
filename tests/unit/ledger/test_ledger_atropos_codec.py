"""Posted groups as the native trainer decodes them: every field is used, or refused by name."""

import json
from typing import Any

import numpy as np
import pytest

from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.group_codec import decode_group, encode_group
from rollbook.ledger.atropos.codec import decode_scored_data
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.rows import flatten
from tests.parts.trainer.batches import batch_of


def posted(**fields: Any) -> PromptGroup:
    body = {
        "tokens": [[1, 2, 3], [1, 4, 5]],
        "masks": [[-100, 2, 3], [-100, 4, 5]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.5, -0.25]],
        **fields,
    }
    return decode_scored_data(json.dumps(body).encode(), GroupId("atropos@3"))


def rows_of(group: PromptGroup) -> list[list[float]]:
    """The advantages of the trained tokens, after the group was stored and decoded."""
    config = TrainerConfig()
    rows = flatten(batch_of(1, [decode_group(encode_group(group).payload).samples]), config)
    (micro,) = plan_minibatch(rows, config, is_packed=False).microbatches
    by_tokens = {
        tuple(micro.targets_N[micro.row_of_N == row]): micro.advantages_N[micro.row_of_N == row].tolist()
        for row in range(micro.num_rows)
    }
    return [by_tokens[2, 3], by_tokens[4, 5]]


def test_posted_advantages_replace_those_computed_from_scores() -> None:
    assert rows_of(posted(advantages=[[0, 2, 3], [0, -1, 0.5]])) == [[2.0, 3.0], [-1.0, 0.5]]
    assert rows_of(posted(advantages=[[4], [5]])) == [[4.0, 4.0], [5.0, 5.0]]
    assert rows_of(posted(advantages=None))[0][0] == pytest.approx(0.7071, rel=1e-3)


def test_an_override_sets_the_advantage_to_zero() -> None:
    first, second = rows_of(posted(overrides=[{"set_advantage_to_zero": True}, {}]))
    assert first == [0.0, 0.0]
    assert second[0] == pytest.approx(-0.7071, rel=1e-3), "the score still counts in the mean"


def test_reference_logprobs_are_kept_and_those_of_masked_tokens_are_unknown() -> None:
    group = posted(ref_logprobs=[[1.0, -0.5, -2.0], None])
    first, second = (sample.sequences[0].reference_logprobs for sample in group.samples)
    assert first is not None
    np.testing.assert_array_equal(first, np.array([np.nan, -0.5, -2.0], np.float32))
    assert second is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"generation_params": {"temperature": 0.5, "max_tokens": 7, "top_p": 1.0, "top_k": -1}}, [0.5, 0.5]),
        ({"overrides": [{"temperature": 0.25}, {}], "generation_params": {"temperature": 0.5}}, [0.25, 0.5]),
        ({"group_overrides": {"temperature": 2}}, [2.0, 2.0]),
        ({}, [1.0, 1.0]),
    ],
)
def test_the_temperature_of_the_environment_is_the_one_trained_at(fields: Any, expected: list[float]) -> None:
    assert [sample.sampling.temperature for sample in posted(**fields).samples] == expected


def test_a_policy_version_lets_the_lag_be_judged() -> None:
    assert posted(policy_version=4).trained_publications() == {4}
    assert posted(policy_version=[4, 5]).trained_publications() == {4, 5}
    assert posted().trained_publications() == {-1}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"images": ["x"]}, "images"),
        ({"distill_token_ids": [[[1]]]}, "distill_token_ids"),
        ({"distill_logprobs": [[[0.0]]]}, "distill_logprobs"),
        ({"overrides": [{"kl_coef": 2}, {}]}, r"overrides\[0\] sets kl_coef"),
        ({"group_overrides": {"lr": 2}}, "group_overrides sets lr"),
        ({"generation_params": {"top_p": 0.5}}, "top_p"),
        ({"generation_params": {"top_k": 40}}, "top_k"),
        ({"advantages": [[1, 2], [1, 2, 3]]}, r"advantages\[0\] has 2 numbers for 3 tokens"),
        ({"advantages": [[1]]}, "advantages has 1 entries for 2 sequences"),
        ({"scores": [1.0]}, "2 sequences, but 1 scores"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_name(fields: Any, name: str) -> None:
    with pytest.raises(UnusableGroupError, match=name):
        posted(**fields)
