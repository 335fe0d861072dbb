"""A turn as a stream: parts with text and tokens, sent while the rest of the turn is sampled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollbook.contracts.output_formats import IncrementalDecoder, StopStrings
from rollbook.contracts.policy import Completion, FinishReason, TokenChunk, joined_completion
from rollbook.rollout.agents.tool_calls import ToolParser
from rollbook.rollout.contract import Tokenizer


@dataclass(frozen=True, slots=True)
class SampledToken:
    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logprobs, if they were requested."""


@dataclass(frozen=True, slots=True)
class TurnPart:
    """New text, and the tokens since the last part."""

    text: str
    tokens: Sequence[SampledToken]


OnPart: TypeAlias = Callable[[TurnPart], None]


def sampled_tokens(sampled: Completion | TokenChunk) -> list[SampledToken]:
    ids, logprobs, tops = sampled.token_ids.tolist(), sampled.logprobs.tolist(), sampled.tops
    if tops is None:
        return list(map(SampledToken, ids, logprobs))
    rows = zip(tops.token_ids.tolist(), tops.logprobs.tolist(), strict=True)
    # Excluded from sampling: -inf.
    possible = [
        tuple((id_, logprob) for id_, logprob in zip(*row, strict=True) if not math.isinf(logprob)) for row in rows
    ]
    return list(map(SampledToken, ids, logprobs, possible))


def unsent_text(content: str, sent: str) -> str:
    """What follows the parts that were sent. A parser may have removed white space at the start that was sent already."""
    start = sent if content.startswith(sent) else sent.lstrip()
    return content[len(start) :] if content.startswith(start) else ""


class TurnStream:
    """Decodes the tokens of one turn as they arrive, and passes parts on.

    All parts together are the start of the turn's content. Text that may become a stop string or tool call is held back, and so is
    white space before it. A parser whose calls may begin anywhere gets the whole text first.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str], parser: ToolParser | None, on_part: OnPart
    ) -> None:
        """`parser`: None without tools."""
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._stops = StopStrings(stops)
        opening = getattr(parser, "opening", None)
        self._opening = StopStrings([] if opening is None else [opening])
        self._is_held = parser is not None and opening is None
        self._space: list[str] = []
        self._tokens: list[SampledToken] = []
        self._on_part = on_part
        self.received: list[TokenChunk] = []

    def completion(self) -> Completion:
        """The tokens so far, as a turn that the agent ended; no limit cut it."""
        return joined_completion(self.received, FinishReason.STOP)

    def feed(self, chunk: TokenChunk) -> None:
        self.received.append(chunk)
        for token in sampled_tokens(chunk):
            if self._stops.matched is not None or self._is_held:
                return
            self._tokens.append(token)
            text = self._opening.feed(self._stops.feed(self._decoder.feed([token.id])))
            shown = text.rstrip()
            if shown:
                self._on_part(TurnPart("".join(self._space) + shown, self._tokens))
                self._tokens, self._space = [], []
            self._space.append(text[len(shown) :])
