"""The author of each token of a recorded sequence: the policy, another message, or the chat template.

Sampled tokens are known from the record. The others are found by text: messages are searched in order, each after the previous one.
Tokens outside all messages belong to the template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollbook.contracts.trajectory import TokenRow, TurnMark

POLICY = "policy"
TEMPLATE = "template"
CONTEXT = "context"
"""Author of the unsampled tokens of an episode without recorded messages."""


class Pieces(Protocol):
    """Implemented by `chat.tokenizer.ModelTokenizer`."""

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of these tokens, and the character span of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `start` to `end` (exclusive) of one author."""

    start: int
    end: int
    author: str
    """`policy`, `template`, `context`, or the role of a message: `system`, `user`, `tool`, `assistant` (not sampled here)."""


def spans_of(
    row: TokenRow,
    turns: Sequence[TurnMark],
    messages: Sequence[Mapping[str, Any]] | None,
    tokenizer: Pieces,
) -> list[TokenSpan]:
    """`turns` are those of this sequence."""
    ids = row.token_ids.tolist()
    authors = [CONTEXT if messages is None else TEMPLATE] * len(ids)
    if messages is not None:
        text, offsets = tokenizer.pieces(ids)
        first = 0
        for start, end, role in _message_spans(messages, text):
            # Spans and tokens are in the order of the text.
            while first < len(ids) and offsets[first][1] <= start:
                first += 1
            for at in range(first, len(ids)):
                begin, stop = offsets[at]
                if begin >= end:
                    break
                if stop > start:
                    authors[at] = role
    for turn in turns:
        authors[turn.start : turn.end] = [POLICY] * (turn.end - turn.start)
    for at, is_sampled in enumerate(row.loss_mask.tolist()):
        if is_sampled:
            authors[at] = POLICY
    return _joined(authors)


def _message_spans(messages: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    cursor = 0
    for message in messages:
        # Templates trim the content.
        content = str(message.get("content") or "").strip()
        at = text.find(content, cursor) if content else -1
        if at >= 0:
            found.append((at, at + len(content), str(message.get("role", CONTEXT))))
            cursor = at + len(content)
    return found


def _joined(authors: Sequence[str]) -> list[TokenSpan]:
    spans: list[TokenSpan] = []
    start = 0
    for at in range(1, len(authors) + 1):
        if at == len(authors) or authors[at] != authors[start]:
            spans.append(TokenSpan(start=start, end=at, author=authors[start]))
            start = at
    return spans
