"""The seam between the policy server and whatever answers behind it.

An engine samples from published weights only: until the first `load_weights` it has no publication and must not be asked. It admits
new requests between decode steps, applies weights between forwards, and stamps every token with the publication of the very
forward that produced its logits. Cancelling a request, or the future of `submit`, frees its slot before the next step.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Completion, Publication, SamplingParams, TopLogprobs
from rollbook.contracts.weights import RawTensor
from rollbook.inference.config import InferenceConfig, KvAfterUpdate
from rollbook.inference.pause import PauseMode
from rollbook.telemetry.spans import SpanRecorder


class QueueFullError(TransientError):
    """More requests wait than the engine is allowed to hold."""


class UnpublishedError(TransientError):
    """The engine has no published weights yet, so it does not sample."""


class EngineClosedError(TransientError):
    """The engine was closed while the request was in it."""


class GenerationError(EpisodeError):
    """The model failed on this request (logits that are not numbers, a forward that raised). Other requests go on."""


class WeightsError(RunError):
    """Weights that cannot be loaded: unreadable, damaged, or made for another model. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was opened, and what it holds now."""

    running: int
    queued: int
    requests: int
    """Requests answered."""
    tokens: int
    """Tokens sampled."""
    steps: int
    """Rounds of: admit, prefill the admitted, decode all running by one token."""
    forwards: int
    busy_s: float
    """Seconds spent in steps."""
    kv_after_update: KvAfterUpdate
    """What becomes of the cache of running requests when weights arrive: a reply that spans two versions should say it."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again, because an earlier request had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one request that were sampled since the last chunk, for whoever streams them."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    cached_tokens: int = 0
    tops: TopLogprobs | None = None


OnTokens = Callable[[TokenChunk], None]
"""Called on the event loop, at most once a round, and always before the answer."""


class DeviceTensor(Protocol):
    """A tensor of the engine's own library, wherever it lives. torch's are such."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...


TensorSource = RawTensor | DeviceTensor
"""One tensor of an update: bytes in host memory with their dtype and shape, or a tensor the engine can copy from."""


class Engine(Protocol):
    """Open with `async with`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def publication(self) -> Publication | None:
        """The weights the next forward will use; None until some were published."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is live; None while the weights are whole by themselves. One at a time."""

    @property
    def is_paused(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> asyncio.Future[Completion]:
        """Queue a request. Raises `BadRequestError`, `QueueFullError` or `UnpublishedError` at once; cancel the future to abort."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion: ...

    async def load_weights(self, publication: Publication, path: Path, *, adapter: Adapter | None = None) -> None:
        """Check the file completely, then apply it between two forwards. Idempotent.

        With `adapter` the tensors are its own: they stand beside the base, in place of the adapter before.
        Raises `OutdatedUpdateError` or `WeightsError`; then nothing was changed.
        """

    async def load_tensors(
        self, publication: Publication, tensors: Mapping[str, TensorSource], *, adapter: Adapter | None = None
    ) -> None:
        """As `load_weights`, for tensors that are in memory already. They may be freed once this returns.

        Bytes in host memory are checked against the publication's digest; what lies on a device is not read back for that:
        ask `weights_digest` afterwards.
        """

    async def unload_adapter(self, publication: Publication) -> None:
        """Back to the base alone, as a publication of its own. Without an adapter only the publication changes."""

    async def base_digest(self) -> str:
        """Digest of the weights without any adapter."""

    async def adopt(self, publication: Publication) -> None:
        """Name the weights that the engine was opened with. For a server that no trainer has published to yet.

        Raises `OutdatedUpdateError` when something else was published already.
        """

    async def weights_digest(self) -> str:
        """Digest of the weights as they are now, read between two forwards. Equals the published one where the dtypes are equal.

        With an adapter it is the adapter's, provided that the weights in use are what it makes of its base.
        """

    async def abort_all(self) -> int:
        """End every request that runs or waits, with what it has, as `abort`. Tells how many."""

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is being sampled any more. Requests that come meanwhile wait."""

    async def resume(self) -> None: ...


# Each engine is imported only where it is configured, so that a scripted server starts without torch.
ENGINES: dict[str, str] = {
    "transformers": "rollbook.inference.engines.embedded.engine:open_engine",
    "scripted": "rollbook.inference.engines.scripted:open_engine",
}


def open_engine(
    config: InferenceConfig, model_dir: Path | None, *, spans: SpanRecorder | None = None
) -> AbstractAsyncContextManager[Engine]:
    """The configured engine. `model_dir`: a Hugging Face directory with config and weights; the scripted engine needs none."""
    opener = load_on_demand(ENGINES[config.engine])
    engine: AbstractAsyncContextManager[Engine] = opener(config, model_dir, spans=spans)
    return engine
