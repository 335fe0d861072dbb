"""Text that arrives in parts: no split loses, repeats or tears text, or passes it on too early."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.output_formats import REPLACEMENT, IncrementalDecoder, StopStrings, parse_tool_calls
from rollbook.inference.server.text import ToolCallStream

TEXT = st.text(alphabet="abc ", max_size=40)


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer with one token per byte, which splits most characters."""
    return bytes(token_ids).decode(errors="replace")


@st.composite
def parts_of(draw: st.DrawFn, text: str) -> list[str]:
    splits = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in itertools.pairwise([0, *splits, len(text)])]


@given(st.text(max_size=30))
def test_text_decoded_byte_by_byte_is_complete_and_never_contains_half_a_character(text: str) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    parts = [decoder.feed([byte]) for byte in text.encode()]
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in part for part in parts)
    assert "".join(parts) + decoder.finish() == text


@given(
    st.binary(max_size=30)
    | st.lists(st.sampled_from([b"\xe2\x82", b"\xff", b"\x80", "€😀".encode()]), max_size=40).map(b"".join)
)
def test_invalid_bytes_are_decoded_as_when_decoded_at_once(raw: bytes) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    decoded = "".join(decoder.feed([byte]) for byte in raw) + decoder.finish()
    assert decoded == raw.decode(errors="replace")


@pytest.mark.parametrize("token", [0xFF, 0x80, 0xE2], ids=["invalid", "continuation", "start"])
def test_bytes_that_never_become_a_character_are_decoded_a_limited_number_of_times(token: int) -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode_bytes(ids)

    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.feed([token]) for _ in range(2_000)) + decoder.finish()
    assert text == decode_bytes([token] * 2_000)
    assert decoded < 2_000 * 100


def test_special_tokens_without_text_are_decoded_a_limited_number_of_times() -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "".join("x" for token in ids if token)

    decoder = IncrementalDecoder(decode)
    assert "".join(decoder.feed([0]) for _ in range(2_000)) + decoder.feed([1]) + decoder.finish() == "x"
    assert decoded < 2_000 * 100


@given(st.data(), TEXT, st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=3))
def test_the_end_of_the_text_at_a_stop_string_does_not_depend_on_the_parts(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    whole = StopStrings(stops)
    expected = whole.feed(text) + whole.finish()
    in_parts = StopStrings(stops)
    passed = "".join(in_parts.feed(part) for part in data.draw(parts_of(text))) + in_parts.finish()
    assert (passed, in_parts.matched) == (expected, whole.matched)
    assert text.startswith(passed)
    if whole.matched is None:
        assert passed == text
    assert not any(stop in passed for stop in stops)


@given(st.data(), TEXT, TEXT, st.sampled_from(["look", "say_it"]), st.dictionaries(st.text(max_size=3), st.integers()))
def test_a_tool_call_is_parsed_the_same_from_the_whole_text_and_from_parts(
    data: st.DataObject, before: str, after: str, name: str, arguments: dict[str, int]
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    text = f"{before}<tool_call>\n{call}\n</tool_call>{after}"
    rest, calls = parse_tool_calls(text)
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [(name, arguments)]
    assert rest == before + after
    stream = ToolCallStream()
    passed = "".join(stream.feed(part) for part in data.draw(parts_of(text)))
    held, streamed = stream.finish()
    assert streamed == calls
    assert passed + held == rest


@given(st.data(), st.sampled_from(["plain", "<tool_call>{broken</tool_call>", "<tool_call>[]</tool_call> x", "<tool_"]))
def test_text_that_is_not_a_valid_call_stays_text(data: st.DataObject, text: str) -> None:
    assert parse_tool_calls(text) == (text, [])
    stream = ToolCallStream()
    passed = "".join(stream.feed(part) for part in data.draw(parts_of(text)))
    held, calls = stream.finish()
    assert (passed + held, calls) == (text, [])
