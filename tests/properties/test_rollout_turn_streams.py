"""Streamed parts of a turn are the start of its content, whatever its text and however its tokens arrive."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.policy import TokenChunk
from rollbook.rollout.agents.streaming import TurnPart, TurnStream
from rollbook.rollout.agents.tool_calls import ParsedText, ToolParser, parse_hermes, parse_json, parse_none, parse_qwen
from tests.parts.rollout.agents import byte_by_byte, word_tokenizer

TOKENIZER = word_tokenizer()
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PIECES = st.sampled_from(
    ["a", " ", "\n", "日", "<tool", "<tool_call>", "stop", "st", CALL, "</tool_call>", "{", '"', "<think>", "</think>"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def chunk(ids: Sequence[int]) -> TokenChunk:
    return TokenChunk(
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
    )


@given(
    text=TEXTS,
    stops=st.sampled_from([(), ("stop",), ("stop", "t")]),
    parser=st.sampled_from([None, parse_hermes, parse_json, parse_qwen, parse_none]),
    data=st.data(),
)
def test_the_parts_of_a_turn_are_the_start_of_its_content(
    text: str, stops: tuple[str, ...], parser: ToolParser | None, data: st.DataObject
) -> None:
    ids = byte_by_byte(TOKENIZER, f"{text}<|im_end|>")
    parts: list[TurnPart] = []
    stream = TurnStream(TOKENIZER, stops=stops, parser=parser, on_part=parts.append)
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        stream.feed(chunk(ids[at : at + size]))
        at += size
    sent = "".join(part.text for part in parts)
    # The first complete stop text ends the turn.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    before_stop = text[: min(ends)[1]] if ends else text
    content = (parser or ParsedText)(before_stop).content
    assert content.strip().startswith(sent.strip())
    assert [token.id for part in parts for token in part.tokens] == ids[: sum(len(part.tokens) for part in parts)]
    assert all(part.text and part.tokens for part in parts)
    if parser in (None, parse_none) or (parser in (parse_hermes, parse_qwen) and "<" not in text):
        # The end of the text that may be the start of a stop text is not in a part: it is sent with the end of the turn.
        starts = [stop[:length] for stop in stops for length in range(1, len(stop))] if not ends else []
        held = max((len(start) for start in starts if content.endswith(start)), default=0)
        assert content[: len(content) - held].rstrip() == sent
