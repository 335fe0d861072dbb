"""The interface between the policy server and its engine.

An engine samples from published weights only: before the first `load_weights` it refuses requests. It admits new requests between
decode steps, applies weights between forwards, and stamps every token with the publication of the forward that produced its
logits. Cancelling the future of `submit` frees the request's slot before the next step.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import (
    Completion,
    OnTokens,
    Publication,
    SamplerExactness,
    SamplingParams,
    TokenIds,
    TopLogprobs,
)
from rollbook.contracts.weights import Adapter, TensorSource
from rollbook.inference.config import InferenceConfig, KvAfterUpdate
from rollbook.inference.pause import PauseMode
from rollbook.telemetry.spans import SpanRecorder

BASE_MODEL = "base"
"""Names the weights without any adapter, while an adapter is published."""


class EngineQueueFullError(TransientError):
    """The queue of waiting requests is full."""


class UnpublishedError(TransientError):
    """The engine has no published weights yet, so it does not sample."""


class EngineClosedError(TransientError):
    """The engine was closed before the request finished."""


class UnknownAdapterError(EpisodeError):
    """The engine has no adapter of this name, or it was removed before the request finished."""


class GenerationError(EpisodeError):
    """The model failed on this request (NaN logits, a forward that raised). Other requests continue."""


class GrammarError(GenerationError):
    """The grammar of a request is too complex to follow. The request fails, and would fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was opened, and its current load."""

    running: int
    queued: int
    requests: int
    """Completed requests."""
    tokens: int
    """Sampled tokens."""
    steps: int
    """Rounds of: admit, prefill the admitted, decode all running by one token."""
    forwards: int
    busy_s: float
    """Seconds spent in steps."""
    kv_after_update: KvAfterUpdate
    """How a weight update affects the cache of running requests: reported with completions that span two versions."""
    cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    drafted_tokens: int = 0
    """Tokens that were computed ahead of sampling (`draft_tokens`)."""
    accepted_tokens: int = 0
    """Those of them that were sampled."""
    cache_shrinks: int = 0
    """How often the cache of keys and values became smaller, because the device had no memory left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Logprobs of the tokens of a prompt, from the second on, at temperature 1. The first token has none."""

    logprobs: NDArray[np.float32]
    tops: TopLogprobs | None = None
    publication: int | None = None
    """Id of the publication whose weights scored the prompt."""


class TokenConstraint(Protocol):
    """Decides which token may come next in one completion. Called by the engine's thread."""

    def allowed(self) -> NDArray[np.uint8]:
        """One bit for each token of the vocabulary, lowest bit first. Raises `GenerationError`; then the request fails."""

    def accept(self, token_id: int) -> None:
        """Report the sampled token."""


class Engine(Protocol):
    """Open with `async with`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def publication(self) -> Publication | None:
        """The weights of the next forward; None before the first publication."""

    @property
    def adapter(self) -> Adapter | None:
        """The published adapter, or None: it belongs to the policy that is served."""

    @property
    def named_adapters(self) -> Collection[str]:
        """Adapters that are loaded besides the policy, for requests that name them."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def exactness(self) -> SamplerExactness:
        """Whether its logprobs have the bits of the trainer."""

    def stats(self) -> EngineStats: ...

    def submit(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        on_tokens: OnTokens | None = None,
        constraint: TokenConstraint | None = None,
        adapter: str | None = None,
    ) -> asyncio.Future[Completion]:
        """Queue a request. Cancel the future to abort. `adapter`: one of `named_adapters`, or `BASE_MODEL`; None is the policy.

        Raises `BadRequestError`, `UnknownAdapterError`, `EngineQueueFullError` or `UnpublishedError` at once.
        """

    async def generate(self, prompt_ids: TokenIds, sampling: SamplingParams) -> Completion: ...

    async def score(self, prompt_ids: TokenIds, *, top_logprobs: int = 0, adapter: str | None = None) -> PromptScores:
        """Logprobs of a prompt's tokens under the weights in use. Nothing is sampled. Raises as `submit`."""

    async def load_weights(self, publication: Publication, path: Path, *, adapter: Adapter | None = None) -> None:
        """Check the digest of the file, then apply it between two forwards. Idempotent.

        With `adapter` the tensors are an adapter's, which replaces the published one; the base stays as it is. Whole weights remove
        all adapters, because these belong to another base.
        Raises `OutdatedUpdateError` or `WeightsError`; then nothing was changed.
        """

    async def load_tensors(
        self, publication: Publication, tensors: Mapping[str, TensorSource], *, adapter: Adapter | None = None
    ) -> None:
        """Like `load_weights`, for tensors in memory. They may be freed once this returns.

        The digest of bytes in host memory is checked. Tensors on a device are not checked; use `weights_digest` afterwards.
        """

    async def load_adapter(self, adapter: Adapter, tensors: Mapping[str, TensorSource]) -> None:
        """Load an adapter under its name, next to the policy. It replaces one of the same name, also for running requests."""

    async def remove_adapter(self, name: str) -> None:
        """Requests that use it fail with `UnknownAdapterError`."""

    async def base_digest(self) -> str:
        """Digest of the weights without an adapter."""

    async def adopt(self, publication: Publication) -> None:
        """Make the weights that the engine was opened with a publication. For a server without a trainer.

        Raises `OutdatedUpdateError` if something else was published already.
        """

    async def weights_digest(self) -> str:
        """Digest of the weights in use, read between two forwards. Equals the published one if the dtypes are equal.

        With an adapter it is the adapter's digest, if what the forwards read is exactly that adapter.
        """

    async def abort_all(self) -> int:
        """End every running or waiting request with its tokens so far, as `abort`. Returns how many."""

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no tokens are being sampled. New requests wait."""

    async def resume(self) -> None: ...


ProbeComparison = Callable[[Any, Sequence[Any]], str | None]
"""Gets a model and what an engine sampled with it (`numerics.machine.ProbedAnswer`). Says what a trainer computes differently."""

# Each engine is imported only where it is configured, so that a scripted server starts without torch.
ENGINES: dict[str, str] = {
    "transformers": "rollbook.inference.engines.embedded.engine:open_engine",
    "scripted": "rollbook.inference.engines.scripted:open_engine",
}


def open_engine(
    config: InferenceConfig,
    model_dir: Path | None,
    *,
    spans: SpanRecorder | None = None,
    shared_base: Path | None = None,
    compare: ProbeComparison | None = None,
) -> AbstractAsyncContextManager[Engine]:
    """The configured engine. `model_dir`: a Hugging Face directory with config and weights; the scripted engine needs none.

    `shared_base`: the file with which the transformers engine maps the weights of another process, see `shared_weights`. `compare`:
    how it checks its exact logprobs before it serves.
    """
    opener = load_on_demand(ENGINES[config.engine])
    more = {"shared_base": shared_base, "compare": compare} if config.engine == "transformers" else {}
    engine: AbstractAsyncContextManager[Engine] = opener(config, model_dir, spans=spans, **more)
    return engine
