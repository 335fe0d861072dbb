"""Laws of text in pieces: however it is cut, nothing is lost, doubled, torn, or told too early."""

import itertools
import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.tool_calls import parse_tool_calls
from rollbook.inference.server.detokenizer import REPLACEMENT, IncrementalText
from rollbook.inference.server.stop_strings import StopStrings
from rollbook.inference.server.tool_calls import ToolCallText

TEXT = st.text(alphabet="abc ", max_size=40)


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte: the hardest case for characters."""
    return bytes(token_ids).decode(errors="replace")


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *places, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(st.text(max_size=30))
def test_text_told_byte_by_byte_is_the_text_and_never_holds_half_a_character(text: str) -> None:
    incremental = IncrementalText(decode_bytes)
    pieces = [incremental.feed([byte]) for byte in text.encode()]
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) + incremental.finish() == text


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_are_told_as_decoding_at_once_tells_them(raw: bytes) -> None:
    incremental = IncrementalText(decode_bytes)
    told = "".join(incremental.feed([byte]) for byte in raw) + incremental.finish()
    assert told == raw.decode(errors="replace")


@given(st.data(), TEXT, st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=3))
def test_where_a_stop_string_ends_the_text_does_not_hang_on_the_pieces(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    whole = StopStrings(stops)
    expected = whole.feed(text) + whole.finish()
    piecewise = StopStrings(stops)
    told = "".join(piecewise.feed(piece) for piece in data.draw(cut(text))) + piecewise.finish()
    assert (told, piecewise.matched) == (expected, whole.matched)
    assert text.startswith(told)
    if whole.matched is None:
        assert told == text
    assert not any(stop in told for stop in stops)


@given(st.data(), TEXT, TEXT, st.sampled_from(["look", "say_it"]), st.dictionaries(st.text(max_size=3), st.integers()))
def test_a_tool_call_is_read_alike_whole_and_in_pieces(
    data: st.DataObject, before: str, after: str, name: str, arguments: dict[str, int]
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    text = f"{before}<tool_call>\n{call}\n</tool_call>{after}"
    rest, calls = parse_tool_calls(text)
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [(name, arguments)]
    assert rest == before + after
    stream = ToolCallText()
    told = "".join(stream.feed(piece) for piece in data.draw(cut(text)))
    held, streamed = stream.finish()
    assert streamed == calls
    assert told + held == rest


@given(st.data(), st.sampled_from(["plain", "<tool_call>{broken</tool_call>", "<tool_call>[]</tool_call> x", "<tool_"]))
def test_what_is_no_call_stays_text(data: st.DataObject, text: str) -> None:
    assert parse_tool_calls(text) == (text, [])
    stream = ToolCallText()
    told = "".join(stream.feed(piece) for piece in data.draw(cut(text)))
    held, calls = stream.finish()
    assert (told + held, calls) == (text, [])
