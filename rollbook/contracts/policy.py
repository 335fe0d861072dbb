"""What crosses between an episode and the policy: sampling parameters, completions, publications.

A *publication* is one set of weights pushed to the engines. Its id is never reused; its `step` is the policy version that lag is
computed from (0 for the initial weights). Tokens are stamped with publication ids.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

PublicationId = NewType("PublicationId", int)

NOT_SAMPLED = -1
"""The stamp of a token that the policy did not sample (prompt, observation) or whose publication is unknown."""


MAX_TOP_LOGPROBS = 20
"""As many as OpenAI's API tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights that were pushed, as the ledger registered them."""

    id: PublicationId
    epoch: int
    """The trainer incarnation that published them."""
    step: int
    """The policy version: 0 for the initial weights, s after training batch s."""
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a completion is sampled. The trainer computes logprobs at the same temperature."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means: no truncation."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    """Beside each token, so many of the likeliest ones are told."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least one token must be sampled")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be >= 0 (0 samples greedily)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be >= 0 (0 switches it off)")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; 0 to {MAX_TOP_LOGPROBS} are possible")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens of each position, likeliest first, one row a token. -inf: it could not have been sampled."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled: ids, logprobs of the sampling distribution, and the publication behind each token."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    generation_s: float | None = None
    """Seconds from its first token to its last, where the server says so: what the policy itself took, without any queue."""
    cached_tokens: int = 0
    """Tokens of its prompt that an earlier request had computed already, with the same weights."""
    tops: TopLogprobs | None = None
    """Where they were asked for."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion out of step: {len(self.token_ids)} ids, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions"
            )
