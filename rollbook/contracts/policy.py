"""Values exchanged between an episode and the policy: sampling parameters, completions, publications.

A *publication* is one set of weights pushed to the engines. Its id is never reused; its `step` is the policy version from which lag
is computed (0 for the initial weights). Each token carries the id of the publication that sampled it.

Values of every turn are msgspec structs: creating one takes a tenth of the time of a frozen dataclass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

PublicationId = NewType("PublicationId", int)
TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]

NOT_SAMPLED = -1
"""The version of a token that the policy did not sample (prompt, observation) or whose publication is unknown."""

MAX_INT32 = 2**31 - 1
MAX_TOP_LOGPROBS = 20
"""The limit of OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights registered in the ledger and pushed to the engines."""

    id: PublicationId
    epoch: int
    """The epoch of the trainer that published them."""
    step: int
    """The policy version: 0 for the initial weights, s after batch s was trained."""
    digest: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a completion is sampled. The trainer computes logprobs at the same temperature."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    """Report this many of the likeliest tokens at each position."""
    grammar: str | None = None
    """The completion follows this grammar (`output_formats.py`). Logprobs are those of the allowed tokens, renormalised."""
    complete_at_max_tokens: bool = False
    """A completion of `max_tokens` tokens is complete, not cut: an action has this length by design."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_INT32:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be 1 to {MAX_INT32}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be >= 0 (0 samples greedily) and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0 <= self.top_k <= MAX_INT32:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) to {MAX_INT32}")
        if self.stop_token_ids and not 0 <= min(self.stop_token_ids) <= max(self.stop_token_ids) <= MAX_INT32:
            raise ValueError(f"stop_token_ids has an id that is not 0 to {MAX_INT32}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must fit into a signed integer of 64 bits")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be 0 to {MAX_TOP_LOGPROBS}")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens of each position, likeliest first, one row per position. -inf: excluded from sampling."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: ids, logprobs of the sampling distribution, and the publication of each token."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    generation_s: float | None = None
    """Seconds from the first token to the last, without time in a queue; None if the server does not report it."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    tops: TopLogprobs | None = None
    """If `top_logprobs` were requested."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion with arrays of unequal length: {len(self.token_ids)} ids, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions"
            )


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a streaming request that were sampled since its last chunk."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    cached_tokens: int = 0
    tops: TopLogprobs | None = None


OnTokens: TypeAlias = Callable[[TokenChunk], None]
"""Called on the event loop, at most once a round, and always before the completion."""


Sampled = TypeVar("Sampled", Completion, TokenChunk)


def first_tokens(sampled: Sampled, count: int) -> Sampled:
    """Without the tokens after the first `count`."""
    tops = sampled.tops
    return msgspec.structs.replace(
        sampled,
        token_ids=sampled.token_ids[:count],
        logprobs=sampled.logprobs[:count],
        versions=sampled.versions[:count],
        tops=None if tops is None else TopLogprobs(token_ids=tops.token_ids[:count], logprobs=tops.logprobs[:count]),
    )


def joined_chunks(chunks: Sequence[TokenChunk | Completion]) -> TokenChunk:
    if len(chunks) == 1 and isinstance(chunks[0], TokenChunk):
        return chunks[0]
    if not chunks:
        empty = np.empty(0, dtype=np.int32)
        return TokenChunk(token_ids=empty, logprobs=np.empty(0, dtype=np.float32), versions=empty)
    tops = [chunk.tops for chunk in chunks if chunk.tops is not None]
    return TokenChunk(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        cached_tokens=chunks[-1].cached_tokens,
        tops=TopLogprobs(
            token_ids=np.concatenate([top.token_ids for top in tops]),
            logprobs=np.concatenate([top.logprobs for top in tops]),
        )
        if tops
        else None,
    )


def is_cut(completion: Completion, sampling: SamplingParams) -> bool:
    """Whether a limit of tokens cut the completion before its end."""
    is_complete = sampling.complete_at_max_tokens and len(completion.token_ids) >= sampling.max_tokens
    return completion.finish_reason is FinishReason.LENGTH and not is_complete


def joined_completion(
    chunks: Sequence[TokenChunk | Completion], reason: FinishReason, *, generation_s: float | None = None
) -> Completion:
    tokens = joined_chunks(chunks)
    return Completion(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        finish_reason=reason,
        generation_s=generation_s,
        cached_tokens=tokens.cached_tokens,
        tops=tokens.tops,
    )
