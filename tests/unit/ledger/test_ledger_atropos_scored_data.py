"""Reading a posted group: the quick way and the lax way come to the same, and what is stored is what was sent."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import decode_payload
from rollbook.ledger.atropos.models import FIELDS, Refusal
from rollbook.ledger.atropos.scored_data import read_group, read_groups

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | FINITE | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    rows = [draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)) for n in lengths]
    group: dict[str, Any] = {"tokens": rows, "masks": [[-100 if t % 2 else t for t in row] for row in rows]}
    group["scores"] = draw(st.lists(FINITE, min_size=len(rows), max_size=len(rows)))
    for name in ("advantages", "inference_logprobs"):
        if draw(st.booleans()):
            group[name] = draw(st.lists(st.lists(FINITE, max_size=3), max_size=3) | st.none())
    if draw(st.booleans()):
        group["images"] = draw(ANY_JSON)
    return group


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.sampled_from([None, 1]))
def test_what_is_stored_means_what_was_sent(group: dict[str, Any], indent: int | None) -> None:
    stored = json.loads(read_group(json.dumps(group, indent=indent).encode()).payload)
    assert list(stored) == list(FIELDS)
    assert stored == {name: group.get(name) for name in FIELDS}


@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON))
def test_whatever_comes_is_read_or_refused(group: dict[str, Any]) -> None:
    with suppress(Refusal):
        assert json.loads(read_group(json.dumps(group).encode()).payload)["tokens"] is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b"[" * 100_000, b'{"tokens":[[1]],"masks":[[1]],"scores":[1e999]}'],
)
def test_bodies_that_are_no_group_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        read_group(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inference_logprobs", "[[1e999]]"),
        ("inference_logprobs", "[[1,2],3]"),
        ("inference_logprobs", "[1]"),
        ("inference_logprobs", '[["x"]]'),
        ("generation_params", '{"a":1e999}'),
        ("images", "NaN"),
        ("tokens", "[[1],[2]]"),
        ("tokens", "[[[1]]]"),
        ("env_id", "99999999999999999999"),
    ],
)
def test_the_quick_way_lets_nothing_wrong_through(field: str, value: str) -> None:
    parts = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1]", field: value}
    body = "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
    with pytest.raises(Refusal):
        read_group(body.encode())


def test_outcome_counts_what_is_trained() -> None:
    group = read_group(b'{"tokens":[[1,2],[3]],"masks":[[-100,2],[3]],"scores":[1,0]}')
    assert (group.size, group.outcome.mean_response_tokens, group.outcome.reward_mean) == (2, 1.0, 0.5)
    assert read_groups(b"[]") == []


def test_a_native_trainer_can_read_what_an_atropos_environment_posted() -> None:
    body = {"tokens": [[5, 6, 7]], "masks": [[-100, 6, 7]], "scores": [2.0], "inference_logprobs": [[1.0, -0.5, 1.0]]}
    group = decode_payload(read_group(json.dumps(body).encode()).payload, GroupId("env_0@3"))
    (sample,) = group.samples
    row = sample.sequences[0]
    assert (group.id, group.task_id, group.draw, sample.reward) == ("env_0@3", "env_0", 3, 2.0)
    assert row.token_ids.tolist() == [5, 6, 7]
    assert row.loss_mask.tolist() == [False, True, True]
    assert row.logprobs[:2].tolist() == [0.0, -0.5]
    assert math.isnan(row.logprobs[2])
