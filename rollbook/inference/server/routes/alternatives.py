"""What else might have been sampled, in OpenAI's two shapes. What the truncation left out could not have been, and is not told."""

import math
from collections.abc import Iterator

from rollbook.contracts.policy import TopLogprobs
from rollbook.inference.server.tokenizer import Texts
from rollbook.inference.wire.chat import TopLogprob


def top_dicts(ids: list[int], logprobs: list[float], tops: TopLogprobs, texts: Texts | None) -> list[dict[str, float]]:
    """Of completions: text to logprob. The sampled token is always among them, so there may be one more than was asked for."""
    found = []
    for at, (sampled, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        told = dict(_possible(tops, at))
        told.setdefault(sampled, logprob)
        by_text: dict[str, float] = {}
        for token, value in told.items():
            # Tokens that are parts of a character may look alike: the likeliest of them is told, they come in that order.
            by_text.setdefault(_text(token, texts), value)
        found.append(by_text)
    return found


def top_list(tops: TopLogprobs, at: int, texts: Texts) -> list[TopLogprob]:
    """Of chat: as many as were asked for."""
    found = []
    for token, logprob in _possible(tops, at):
        raw = texts.token_bytes(token)
        found.append(TopLogprob(token=raw.decode(errors="replace"), logprob=logprob, bytes=list(raw)))
    return found


def _possible(tops: TopLogprobs, at: int) -> Iterator[tuple[int, float]]:
    for token, logprob in zip(tops.token_ids[at].tolist(), tops.logprobs[at].tolist(), strict=True):
        if not math.isinf(logprob):
            yield token, logprob


def _text(token: int, texts: Texts | None) -> str:
    """Without a tokenizer, as vLLM names tokens that it is asked not to spell out."""
    return f"token_id:{token}" if texts is None else texts.token_bytes(token).decode(errors="replace")
