"""One request inside an engine: its prompt and settings, and the tokens so far with their logprobs and publications."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    OnTokens,
    SamplingParams,
    TokenChunk,
    TokenIds,
    TopLogprobs,
)
from rollbook.inference.engine import TokenConstraint

_MASK_64 = (1 << 64) - 1
_SEED_FACTOR = 0x9E3779B97F4A7C15


class BadRequestError(EpisodeError, ValueError):
    """The request is invalid. `param` is the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_bad_request, (str(self), self.param))


def _unpickle_bad_request(message: str, param: str | None) -> BadRequestError:
    return BadRequestError(message, param=param)


class GenerationRequest:
    """Used by its engine only. A caller aborts it by cancelling `future`.

    `adapter` is the slot of its adapter, 0 for the policy. These fields belong to the embedded engine: `order` (of arrival), `row`
    (-1 until it joins for the first time), `segments` (row, first round, round after the last), `is_finished`,
    `weights_generation` (of the keys and values in its row), `cached_kv` (a copy of these, or their blocks), `cached_tokens` (the
    part of its prompt that was taken from the prefix cache), `draft` (tokens that the next round computes ahead), `lookup` (makes
    the drafts) and `routes` (the experts chosen for its tokens, once it is complete).
    """

    __slots__ = (
        "adapter",
        "cached_kv",
        "cached_tokens",
        "constraint",
        "draft",
        "future",
        "is_finished",
        "limit",
        "logprobs",
        "lookup",
        "mask",
        "num_reported",
        "on_tokens",
        "order",
        "prompt",
        "routes",
        "row",
        "sampling",
        "seed",
        "segments",
        "started_at",
        "tokens",
        "top_logprobs",
        "top_tokens",
        "versions",
        "weights_generation",
    )

    def __init__(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        limit: int,
        future: asyncio.Future[Completion],
        on_tokens: OnTokens | None = None,
        constraint: TokenConstraint | None = None,
        adapter: int = 0,
    ) -> None:
        self.prompt = prompt
        self.adapter = adapter
        self.sampling = sampling
        self.limit = limit
        self.future = future
        self.started_at = 0.0
        self.on_tokens = on_tokens
        self.constraint = constraint
        self.mask: NDArray[np.uint8] | None = None
        """The tokens that the constraint allows next; None: not computed yet."""
        self.num_reported = 0
        self.tokens = array("i")
        self.logprobs = array("f")
        self.versions = array("i")
        self.top_tokens: list[NDArray[np.int32]] = []
        self.top_logprobs: list[NDArray[np.float32]] = []
        self.seed = sampling.seed or 0
        self.order = 0
        self.row = -1
        self.segments: list[tuple[int, int, int | None]] = []
        self.is_finished = False
        self.weights_generation = 0
        self.cached_kv: Any = None
        self.cached_tokens = 0
        self.draft: list[int] = []
        self.lookup: Any = None
        self.routes: NDArray[Any] | None = None

    def start(self) -> None:
        """Record when its first token was sampled. A preempted request that joins again has started before."""
        if not self.started_at:
            self.started_at = time.monotonic()

    def extend(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32]) -> None:
        """Add sampled tokens."""
        self.tokens.frombytes(tokens.astype(np.int32, copy=False).tobytes())
        self.logprobs.frombytes(logprobs.astype(np.float32, copy=False).tobytes())
        self.versions.frombytes(versions.astype(np.int32, copy=False).tobytes())

    def append(self, token: int, logprob: float, publication: int) -> FinishReason | None:
        """Add a sampled token. Returns a reason if it is the last."""
        self.start()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(publication)
        if token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def update_mask(self) -> NDArray[np.uint8] | None:
        """The tokens that may come next; None if all may. Raises `GenerationError`."""
        if self.constraint is not None and self.mask is None:
            self.mask = self.constraint.allowed()
        return self.mask

    def accept(self, token: int) -> None:
        """Report a sampled token to the constraint."""
        if self.constraint is not None:
            self.constraint.accept(token)
            self.mask = None

    def take_chunk(self) -> TokenChunk | None:
        """The tokens sampled since the last call, or None."""
        start, self.num_reported = self.num_reported, len(self.tokens)
        if start == self.num_reported:
            return None
        return TokenChunk(
            token_ids=np.frombuffer(self.tokens[start:], np.int32),
            logprobs=np.frombuffer(self.logprobs[start:], np.float32),
            versions=np.frombuffer(self.versions[start:], np.int32),
            cached_tokens=self.cached_tokens,
            tops=self._tops(start),
        )

    def completion(self, reason: FinishReason) -> Completion:
        """The result of a request that has ended: its arrays are shared, so no token can be added afterwards."""
        return Completion(
            token_ids=np.frombuffer(self.tokens, np.int32),
            logprobs=np.frombuffer(self.logprobs, np.float32),
            versions=np.frombuffer(self.versions, np.int32),
            finish_reason=reason,
            generation_s=time.monotonic() - self.started_at if self.tokens else 0.0,
            cached_tokens=self.cached_tokens,
            tops=self._tops(0),
            routes=None if reason is FinishReason.ABORT else self.routes,
        )

    def _tops(self, start: int) -> TopLogprobs | None:
        """One entry for each token from `start`, or None."""
        if not self.sampling.top_logprobs or len(self.top_tokens) == start:
            return None
        return TopLogprobs(token_ids=np.stack(self.top_tokens[start:]), logprobs=np.stack(self.top_logprobs[start:]))


def checked_request(
    prompt_ids: TokenIds,
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    future: asyncio.Future[Completion],
    on_tokens: OnTokens | None = None,
    constraint: TokenConstraint | None = None,
    adapter: int = 0,
) -> GenerationRequest:
    """A valid request; raises `BadRequestError` otherwise. The model's length limits the completion."""
    prompt = checked_prompt(prompt_ids, vocab_size=vocab_size, max_length=max_model_len - 1)
    limit = min(sampling.max_tokens, max_model_len - len(prompt))
    return GenerationRequest(
        prompt, sampling, limit=limit, future=future, on_tokens=on_tokens, constraint=constraint, adapter=adapter
    )


def checked_prompt(prompt_ids: TokenIds, *, vocab_size: int, max_length: int) -> NDArray[np.int32]:
    """The prompt as an array. Raises `BadRequestError` if it is empty, too long or outside the vocabulary."""
    if not len(prompt_ids):
        raise BadRequestError("the prompt is empty; it needs at least one token", param="prompt")
    if len(prompt_ids) > max_length:
        raise BadRequestError(
            f"the prompt has {len(prompt_ids)} tokens; at most {max_length} fit into the model's length (max_model_len), "
            "which includes the tokens to sample",
            param="prompt",
        )
    try:
        prompt = token_array(prompt_ids)
    except OverflowError:
        prompt = None
    # As an unsigned integer a negative token is larger than any vocabulary.
    if prompt is None or prompt.view(np.uint32).max() >= vocab_size:
        position, token = next((at, token) for at, token in enumerate(prompt_ids) if not 0 <= token < vocab_size)
        raise BadRequestError(
            f"token {token} at position {position} of the prompt is outside the vocabulary of {vocab_size}",
            param="prompt",
        )
    return prompt


def token_array(tokens: TokenIds) -> NDArray[np.int32]:
    """Raises `OverflowError` if a token does not fit."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype == np.int32:
            return tokens
        # Prefixes are compared as bytes, so every prompt must have the same dtype.
        tokens = tokens.tolist()
    # Several times faster than `np.array` of a list.
    return np.frombuffer(array("i", tokens), dtype=np.int32)


def seeded_uniforms(seeds: Sequence[int], counts: Sequence[int], *, start: int = 0) -> NDArray[np.float64]:
    """Random numbers in [0, 1) for the tokens of requests, one request after the other (splitmix64).

    They depend on a request's seed and on the index of the token. `start`: the index of the first token of each request.
    """
    firsts = np.cumsum(counts, dtype=np.uint64) - np.array(counts, dtype=np.uint64)
    offsets = np.array([seed * _SEED_FACTOR & _MASK_64 for seed in seeds], dtype=np.uint64)
    indices = np.arange(start + 1, start + 1 + sum(counts), dtype=np.uint64) - np.repeat(firsts, counts)
    mixed = indices * np.uint64(0xD1B54A32D192ED03) + np.repeat(offsets, counts)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniforms: NDArray[np.float64] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / (1 << 53)
    return uniforms
