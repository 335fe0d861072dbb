"""Values exchanged between an episode and the policy: sampling parameters, completions, publications.

A *publication* is one set of weights pushed to the engines. Its id is never reused; its `step` is the policy version from which lag
is computed (0 for the initial weights). Each token carries the id of the publication that sampled it.

Values of every turn are msgspec structs: creating one takes a tenth of the time of a frozen dataclass.
"""

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.plugin import load_on_demand

PublicationId = NewType("PublicationId", int)
TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]

Routes: TypeAlias = NDArray[Any]
"""Which experts of a mixture the sampler chose for each token, in each layer (router replay): uint8 or uint16, of shape (tokens,
layers, choices). The choices of a token and a layer are a set, in ascending order. A token whose choices were not recorded has
`unknown_choice` everywhere: the last token of a row always, because no forward consumed it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerExactness:
    """Whether the logprobs of a sampler have the bits of a trainer that computes the same operations on an equal machine."""

    inexact_because: str | None
    """None: they have."""
    recomputes: bool = False
    """After a weight update running requests compute their keys again, so that no token reads keys of older weights."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """What decides bits besides the operations: the GPU, and versions of libraries."""

    @classmethod
    def of_all(cls, found: Sequence["SamplerExactness"]) -> "SamplerExactness | None":
        """What all samplers of a run have in common; None: there are none."""
        if not found:
            return None
        reasons = [one.inexact_because for one in found if one.inexact_because is not None]
        if not reasons and any(one.machine != found[0].machine for one in found):
            reasons = ["the policy servers have different GPUs or libraries"]
        return cls(
            inexact_because=reasons[0] if reasons else None,
            recomputes=all(one.recomputes for one in found),
            machine=found[0].machine,
        )


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
    routes: Routes | None = None
    """Experts chosen for the tokens of prompt and completion, without the last one, which no forward consumed yet. Set if the
    engine records them, and the completion was not aborted."""

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
    tops, more = sampled.tops, {}
    routes = getattr(sampled, "routes", None)
    if routes is not None:
        more["routes"] = routes[: len(routes) - max(0, len(sampled.token_ids) - count)]
    return msgspec.structs.replace(
        sampled,
        **more,
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
    """The last part was sampled after all tokens of the others: its routes are those of all."""
    tokens, last = joined_chunks(chunks), chunks[-1] if chunks else None
    return Completion(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        finish_reason=reason,
        generation_s=generation_s,
        cached_tokens=tokens.cached_tokens,
        tops=tokens.tops,
        routes=last.routes if isinstance(last, Completion) else None,
    )


MAX_ROUTES = 1 << 14
"""Choices of a token in all layers. A damaged header must not allocate all memory. The largest known model has 752."""
ROUTES_LEVEL = 1
_ROUTES_HEADER = struct.Struct("<BHHI")
"""Bytes of a choice, choices, layers, tokens."""


def _zstd() -> Any:
    """On demand: vLLM's environment, where these values are used without routes, does not have it before Python 3.14."""
    return load_on_demand("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def routes_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest type that has a number for every expert, and one for `unknown_choice`."""
    return np.dtype(np.uint8 if num_experts < 1 << 8 else np.uint16)


def unknown_choice(dtype: np.dtype[Any]) -> int:
    return int(np.iinfo(dtype).max)


def with_length(routes: Routes, length: int) -> Routes:
    """Of `length` tokens: cut, or extended by tokens whose choices are unknown."""
    extended = np.full((length, *routes.shape[1:]), unknown_choice(routes.dtype), dtype=routes.dtype)
    extended[: len(routes)] = routes[:length]
    return extended


def pack_routes(routes: Routes) -> bytes:
    """A header, and the differences between neighbouring choices, compressed. The differences of each choice are stored together,
    because their distributions differ. Choices are almost random, so this saves a third of the bytes, not more."""
    ordered = routes.transpose(2, 1, 0)
    # Unsigned numbers wrap around, so any order can be restored.
    steps = np.diff(ordered, axis=0, prepend=np.zeros((1, *ordered.shape[1:]), dtype=routes.dtype))
    header = _ROUTES_HEADER.pack(routes.itemsize, *ordered.shape)
    # The high bytes of large numbers of experts are nearly all 0.
    planes = np.ascontiguousarray(steps).reshape(-1).view(np.uint8).reshape(-1, routes.itemsize).T
    compressed: bytes = _zstd().compress(np.ascontiguousarray(planes).data, level=ROUTES_LEVEL)
    return header + compressed


def unpack_routes(raw: bytes | memoryview, *, num_tokens: int) -> Routes:
    """Raises `ValueError` as `check_packed`."""
    found = check_packed(raw, num_tokens=num_tokens)
    size, choices, layers, tokens = _ROUTES_HEADER.unpack_from(raw)
    planes = np.frombuffer(found, np.uint8).reshape(size, -1)
    steps = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{size}").reshape(choices, layers, tokens)
    dtype = np.dtype(f"u{size}")
    return np.ascontiguousarray(np.cumsum(steps, axis=0, dtype=dtype).transpose(2, 1, 0))


def check_packed(raw: bytes | memoryview, *, num_tokens: int) -> bytes:
    """The decompressed differences. Raises `ValueError` for bytes that `pack_routes` did not write, or for another number of
    tokens, before it allocates them. Any differences are routes of some model, so a ledger need not compute them."""
    if len(raw) < _ROUTES_HEADER.size:
        raise ValueError(f"routes of {len(raw)} bytes have no header")
    size, choices, layers, tokens = _ROUTES_HEADER.unpack_from(raw)
    if tokens != num_tokens:
        raise ValueError(f"the routes are those of {tokens} tokens, not of {num_tokens}")
    if size not in (1, 2) or not 1 <= choices * layers <= MAX_ROUTES:
        raise ValueError(f"routes of {layers} layers with {choices} choices of {size} bytes are not valid")
    num_bytes, zstd = size * choices * layers * tokens, _zstd()
    try:
        found: bytes = zstd.ZstdDecompressor().decompress(raw[_ROUTES_HEADER.size :], max_length=num_bytes + 1)
    except zstd.ZstdError as error:
        raise ValueError(f"the routes cannot be decompressed: {error}") from error
    if len(found) != num_bytes:
        raise ValueError(f"the routes have {len(found)} bytes, not {num_bytes}")
    return found
