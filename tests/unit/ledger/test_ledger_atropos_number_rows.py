"""Lists of numbers looked at where they lie: what is taken is what the reader of whole bodies takes, and means the same."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ledger.atropos import scored_data
from rollbook.ledger.atropos.models import Refusal
from rollbook.ledger.atropos.number_rows import find_float_rows, find_int_rows, find_mask_rows

SEPARATORS = st.sampled_from([(", ", ": "), (",", ":"), (", ", ":"), (" , ", ": ")])
INTS = st.integers(-(10**20), 10**20) | st.integers(-100, 9) | st.just(-100)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-5, 0) | st.just(1.0)


def rows_of(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    return st.lists(st.lists(numbers, max_size=6), max_size=4)


@settings(max_examples=300)
@given(rows_of(INTS), SEPARATORS, st.binary(max_size=3))
def test_integers_that_are_taken_are_the_list_that_json_reads(
    rows: list[list[int]], separators: tuple[str, str], before: bytes
) -> None:
    text = json.dumps(rows, separators=separators).encode()
    found = find_int_rows(before + text + b"]]", len(before))
    if found is not None:
        assert (found.begin, found.end) == (len(before), len(before) + len(text))
        assert found.lengths == [len(row) for row in rows]
        assert found.num_negative == sum(number < 0 for row in rows for number in row)
    if separators[0] != " , " and rows and all(rows):
        assert found is not None


@settings(max_examples=1500)
@given(st.text("0123456789,-[] .e", max_size=14))
def test_no_text_is_taken_that_is_not_json(middle: str) -> None:
    for text in (f"[[{middle}]]", f"[[1, {middle}, 2]]", f"[[1],{middle}]]", f"[[0{middle}]]"):
        body = text.encode()
        ints, floats = find_int_rows(body, 0), find_float_rows(body, 0)
        if ints is not None:
            read = json.loads(body[: ints.end])
            assert ints.lengths == [len(row) for row in read]
            assert all(type(number) is int for row in read for number in row)
        if floats is not None:
            read = json.loads(body[floats[0] : floats[1]])
            assert all(type(number) in (int, float) and number - number == 0 for row in read for number in row)


@settings(max_examples=500)
@given(
    st.lists(st.lists(st.integers(0, 130), min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    SEPARATORS,
    st.none() | st.tuples(st.integers(0, 60), st.sampled_from(b"0123,-[] ")),
)
def test_masks_that_are_taken_are_the_list_that_json_reads(
    tokens: list[list[int]], masked: list[int], separators: tuple[str, str], edit: tuple[int, int] | None
) -> None:
    text = json.dumps(tokens, separators=separators).encode()
    masks = [[-100] * at + row[at:] for row, at in zip(tokens, masked, strict=False)]
    spoiled = bytearray(json.dumps(masks, separators=separators).encode())
    if edit is not None:
        spoiled[edit[0] % len(spoiled)] = edit[1]
    found_tokens = find_int_rows(text + b"]]", 0)
    if found_tokens is None:
        return
    body = text + bytes(spoiled) + b"]]"
    found = find_mask_rows(body, len(text), found_tokens)
    is_usual = edit is None and all(at < len(row) for row, at in zip(tokens, masked, strict=False))
    assert found is not None or not is_usual
    if found is not None:
        read = json.loads(body[found.begin : found.end])
        assert found.lengths == [len(row) for row in read] == [len(row) for row in tokens]
        assert found.num_negative == sum(number < 0 for row in read for number in row)


NUMBERS = st.sampled_from(["1", "0", "-1", "0.5", "-0.25", "1.0", "3e-05", "-1.25e-07", "1" * 20, "0." + "3" * 30])
WRONG = [
    "01",
    "00",
    "-",
    "- 1",
    "+1",
    "1.",
    ".5",
    "1..2",
    "1.2.3",
    "1e-",
    "1e-05.2",
    "1e-5e-5",
    "1e5",
    "1E-5",
    "1 2",
    "1-2",
    "",
]
WORDS = ["NaN", "Infinity", "null", "true", '"1"', "[1]", "{}"]


@settings(max_examples=600)
@given(
    st.lists(st.lists(NUMBERS, min_size=1, max_size=40), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([", ", ","]),
)
def test_one_wrong_number_among_many_is_seen_wherever_it_stands(
    rows: list[list[str]], data: st.DataObject, comma: str
) -> None:
    def text() -> bytes:
        return ("[" + comma.join(f"[{comma.join(row)}]" for row in rows) + "]").encode()

    assert find_float_rows(text() + b"]]", 0) == (0, len(text()))
    row = data.draw(st.sampled_from(rows))
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.sampled_from(WRONG + WORDS))
    assert find_float_rows(text() + b"]]", 0) is None
    assert find_int_rows(text() + b"]]", 0) is None


@pytest.mark.parametrize(
    "text", ["[[01]]", "[[1, 02]]", "[[-01]]", "[[1 2]]", "[[--1]]", "[[1-]]", "[[1,]]", "[[1]", "[[]]"]
)
def test_what_is_no_plain_list_of_integers_is_left_to_others(text: str) -> None:
    assert find_int_rows(text.encode(), 0) is None


@settings(max_examples=200)
@given(rows_of(FLOATS), SEPARATORS)
def test_numbers_that_are_taken_are_whole_lists(rows: list[list[float]], separators: tuple[str, str]) -> None:
    text = json.dumps(rows, separators=separators).encode()
    found = find_float_rows(text + b"]]", 0)
    assert found in (None, (0, len(text)))
    if separators[0] != " , " and rows and all(rows) and b"e+" not in text:
        assert found is not None


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    tokens = [[draw(st.integers(0, 12) | st.integers(0, 200_000)) for _ in range(n)] for n in shape]
    masks = [[draw(st.sampled_from([-100, 0, 1, 77])) for _ in range(n)] for n in shape]
    if draw(st.booleans()):
        masks = [[-100] * at + row[at:] for row in tokens for at in [draw(st.integers(0, len(row)))]]
    each = {
        "tokens": tokens,
        "masks": masks,
        "scores": [draw(FLOATS) for _ in shape],
    }
    more = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "inference_logprobs": st.just([[draw(FLOATS) for _ in range(n)] for n in shape]),
                "advantages": st.just([[0.5] * n for n in shape]),
                "env_id": st.none() | st.integers(0, 9),
                "messages": st.just([[{"role": "user", "content": 'say "tokens": [[1, 2]] é'}]]),
                "overrides": st.just([{"tokens": [[1, 2]], "masks": [[3, 4]]}]),
                "unknown": st.just({"tokens": [[5]]}),
            },
        )
    )
    fields = draw(st.permutations([*each.items(), *more.items()]))
    return json.dumps(dict(fields), separators=draw(SEPARATORS), ensure_ascii=draw(st.booleans())).encode()


def read(body: bytes) -> Any:
    try:
        return scored_data.read_group(body)
    except Refusal as refusal:
        return refusal.details


def read_slowly(body: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(scored_data, "_quick_group", lambda body: None)
        return read(body)


@settings(max_examples=300, deadline=None)
@given(
    bodies(), st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(b'0,-[]" .e}{')), max_size=3), st.booleans()
)
def test_a_body_means_the_same_whichever_way_it_is_read(
    body: bytes, edits: list[tuple[int, int]], inserts: bool
) -> None:
    spoiled = bytearray(body)
    for place, sign in edits:
        at = place % len(spoiled)
        spoiled[at : at if inserts else at + 1] = bytes([sign])
    with pytest.MonkeyPatch.context() as monkeypatch:
        found, slowly = read(bytes(spoiled)), read_slowly(bytes(spoiled), monkeypatch)
    assert repr(found) == repr(slowly)


def test_the_usual_body_takes_the_quick_way() -> None:
    lists = b'"tokens": [[5, 6], [7]], "masks": [[-100, 6], [7]], "inference_logprobs": [[1.0, -2e-05], [-0.1]]'
    body = b'{%s, "scores": [1, 0.5]}' % lists
    found = scored_data._quick_group(body)
    assert found is not None
    assert msgspec.json.decode(found.payload)["inference_logprobs"] == [[1.0, -2e-05], [-0.1]]
    assert found == scored_data._plain_group(scored_data._decoded(body))
