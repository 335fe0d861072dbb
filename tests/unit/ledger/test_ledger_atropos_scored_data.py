"""Parsing a posted group: the typed decoder and the lax model agree, and the stored JSON has the values that were sent."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import decode_payload
from rollbook.ledger.atropos import scored_data
from rollbook.ledger.atropos.models import FIELDS, InvalidBodyError
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
def test_the_stored_json_has_the_values_that_were_sent(group: dict[str, Any], indent: int | None) -> None:
    stored = json.loads(read_group(json.dumps(group, indent=indent).encode()).payload)
    assert stored == {name: group.get(name) for name in FIELDS}


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups(), st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(b'0,-[]" .e}{')), max_size=3), st.booleans()
)
def test_the_typed_decoder_accepts_nothing_that_the_lax_model_rejects(
    group: dict[str, Any], edits: list[tuple[int, int]], is_insertion: bool
) -> None:
    body = bytearray(json.dumps(group).encode())
    for place, character in edits:
        at = place % len(body)
        body[at : at if is_insertion else at + 1] = bytes([character])
    try:
        typed = scored_data._read_typed(bytes(body))
    except ValueError:
        return
    lax = scored_data._read_lax(json.loads(body), ())
    assert json.loads(typed.payload) == json.loads(lax.payload)
    assert (typed.size, typed.env_id, typed.outcome) == (lax.size, lax.env_id, lax.outcome)


def test_a_well_formed_body_is_stored_without_a_second_encoding() -> None:
    body = b'{"tokens": [[5, 6]], "masks": [[-100, 6]], "inference_logprobs": [[1.0, -2e-05]], "scores": [0.50]}'
    assert read_group(body).payload.startswith(body[:-1])


@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON))
def test_any_json_object_is_accepted_or_rejected(group: dict[str, Any]) -> None:
    with suppress(InvalidBodyError):
        assert json.loads(read_group(json.dumps(group).encode()).payload)["tokens"] is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b"[" * 100_000, b'{"tokens":[[1]],"masks":[[1]],"scores":[1e999]}'],
)
def test_a_body_that_is_not_a_group_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidBodyError):
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
def test_an_invalid_field_is_rejected(field: str, value: str) -> None:
    parts = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1]", field: value}
    body = "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
    with pytest.raises(InvalidBodyError):
        read_group(body.encode())


def test_the_outcome_counts_trained_tokens() -> None:
    group = read_group(b'{"tokens":[[1,2],[3]],"masks":[[-100,2],[3]],"scores":[1,0]}')
    assert (group.size, group.outcome.mean_response_tokens, group.outcome.reward_mean) == (2, 1.0, 0.5)
    assert read_groups(b"[]") == []


def test_a_posted_group_can_be_decoded_for_a_native_trainer() -> None:
    body = {"tokens": [[5, 6, 7]], "masks": [[-100, 6, 7]], "scores": [2.0], "inference_logprobs": [[1.0, -0.5, 1.0]]}
    group = decode_payload(read_group(json.dumps(body).encode()).payload, GroupId("env_0@3"))
    (sample,) = group.samples
    row = sample.sequences[0]
    assert (group.id, group.task_id, group.draw, sample.reward) == ("env_0@3", "env_0", 3, 2.0)
    assert row.token_ids.tolist() == [5, 6, 7]
    assert row.loss_mask.tolist() == [False, True, True]
    assert row.logprobs[:2].tolist() == [0.0, -0.5]
    assert math.isnan(row.logprobs[2])
