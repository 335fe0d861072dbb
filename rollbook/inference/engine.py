"""The seam between the policy server and whatever answers behind it.

An engine samples from published weights only: until the first `load_weights` it has no publication and must not be asked. It admits
new requests between decode steps, applies weights between forwards, and stamps every token with the publication of the very
forward that produced its logits. Cancelling a request, or the future of `submit`, frees its slot before the next step.
"""

import asyncio
import importlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.policy import Completion, Publication, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.gate import PauseMode
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
    def is_paused(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> asyncio.Future[Completion]:
        """Queue a request. Raises `BadRequestError`, `QueueFullError` or `UnpublishedError` at once; cancel the future to abort."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion: ...

    async def load_weights(self, publication: Publication, path: Path) -> None:
        """Check the file completely, then apply it between two forwards. Idempotent.

        Raises `OutdatedUpdateError` or `WeightsError`; then nothing was changed.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is being sampled any more. Requests that come meanwhile wait."""

    async def resume(self) -> None: ...


class OpenEngine(Protocol):
    """What every module in `ENGINES` offers as `open_engine`."""

    def __call__(
        self, config: InferenceConfig, model_dir: Path | None, *, spans: SpanRecorder | None
    ) -> AbstractAsyncContextManager[Engine]: ...


# One line an engine. Each is imported only where it was chosen, so that a scripted server starts without torch.
ENGINES: dict[str, str] = {
    "transformers": "rollbook.inference.engines.transformers",
    "scripted": "rollbook.inference.engines.scripted",
}


def open_engine(
    config: InferenceConfig, model_dir: Path | None, *, spans: SpanRecorder | None = None
) -> AbstractAsyncContextManager[Engine]:
    """The engine the config names. `model_dir`: a Hugging Face directory with config and weights; scripted needs none."""
    opener = cast(OpenEngine, importlib.import_module(ENGINES[config.engine]).open_engine)
    return opener(config, model_dir, spans=spans)
