"""One request inside an engine: what was asked, and the tokens so far, each with its logprob and its publication."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams, TopLogprobs
from rollbook.inference.engine import OnTokens, TokenChunk

_MASK_64 = (1 << 64) - 1


class BadRequestError(EpisodeError, ValueError):
    """The request can never be answered. `param` is the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_revive_bad_request, (str(self), self.param))


def _revive_bad_request(message: str, param: str | None) -> BadRequestError:
    return BadRequestError(message, param=param)


class Request:
    """Touched by its engine only. Cancelling `answer` is how a caller aborts.

    `order` (of arrival), `row`, `segments` (row, first round, round after the last) and `is_finished` are the embedded engine's
    notes: where in its slots and in its log the request is. So are `mark` (the weights that its cache began with), `kept` (a copy
    of that cache) and `cached_tokens` (of its prompt, taken over from an earlier request).
    """

    __slots__ = (
        "answer",
        "cached_tokens",
        "first_token",
        "is_finished",
        "kept",
        "limit",
        "logprobs",
        "mark",
        "on_tokens",
        "order",
        "prompt",
        "row",
        "sampling",
        "seed",
        "segments",
        "tokens",
        "told",
        "top_logprobs",
        "top_tokens",
        "versions",
    )

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        limit: int,
        answer: asyncio.Future[Completion],
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.limit = limit
        self.answer = answer
        self.first_token = 0.0
        self.on_tokens = on_tokens
        self.told = 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_tokens: list[NDArray[np.int32]] = []
        self.top_logprobs: list[NDArray[np.float32]] = []
        self.seed = sampling.seed or 0
        self.order = 0
        self.row = -1
        self.segments: list[tuple[int, int, int | None]] = []
        self.is_finished = False
        self.mark = 0
        self.kept: Any = None
        self.cached_tokens = 0

    def begins(self) -> None:
        """It is out of the queue. A request that lost its slot and comes back began long ago."""
        if not self.first_token:
            self.first_token = time.monotonic()

    def extend(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32]) -> None:
        """Add sampled tokens."""
        self.tokens += tokens.tolist()
        self.logprobs += logprobs.tolist()
        self.versions += versions.tolist()

    def take(self, token: int, logprob: float, publication: int) -> FinishReason | None:
        """Add a sampled token. A reason means that it was the last."""
        self.begins()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(publication)
        if token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def untold(self) -> TokenChunk | None:
        """What was sampled since the last call. None: nothing."""
        start, self.told = self.told, len(self.tokens)
        if start == self.told:
            return None
        return TokenChunk(
            token_ids=np.array(self.tokens[start:], dtype=np.int32),
            logprobs=np.array(self.logprobs[start:], dtype=np.float32),
            versions=np.array(self.versions[start:], dtype=np.int32),
            cached_tokens=self.cached_tokens,
            tops=self._tops(start),
        )

    def tell(self) -> None:
        """Hand what is new to whoever streams it. On the event loop only."""
        if self.on_tokens is not None and (chunk := self.untold()) is not None:
            self.on_tokens(chunk)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            generation_s=time.monotonic() - self.first_token if self.tokens else 0.0,
            cached_tokens=self.cached_tokens,
            tops=self._tops(0),
        )

    def _tops(self, start: int) -> TopLogprobs | None:
        """As many as there are tokens, or None."""
        if not self.sampling.top_logprobs or len(self.top_tokens) == start:
            return None
        return TopLogprobs(token_ids=np.stack(self.top_tokens[start:]), logprobs=np.stack(self.top_logprobs[start:]))


def checked_request(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    answer: asyncio.Future[Completion],
    on_tokens: OnTokens | None = None,
) -> Request:
    """A request that the model can answer, or `BadRequestError`. The completion ends where the model's length ends."""
    prompt = prompt_ids if type(prompt_ids) is list else list(prompt_ids)
    if not prompt:
        raise BadRequestError("the prompt is empty; it needs at least one token", param="prompt")
    if len(prompt) >= max_model_len:
        raise BadRequestError(
            f"the prompt has {len(prompt)} tokens; with at least one to sample, at most {max_model_len - 1} fit "
            f"into max_model_len {max_model_len}",
            param="prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise BadRequestError(
            f"token {prompt[at]} at position {at} of the prompt lies outside the vocabulary of {vocab_size}",
            param="prompt",
        )
    limit = min(sampling.max_tokens, max_model_len - len(prompt))
    return Request(prompt, sampling, limit=limit, answer=answer, on_tokens=on_tokens)


def seeded_uniform(seed: int, index: int) -> float:
    """The uniform in [0, 1) behind the `index`-th token of a request with this seed, whatever else runs (splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
