"""Opens either engine over one tiny model, for tests that apply to both."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.contracts.policy import Completion, Publication
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import Engine, open_engine
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.engine import open_engine as open_embedded
from rollbook.inference.engines.embedded.model.capture import Capture
from rollbook.telemetry.spans import SpanRecorder
from tests.parts.inference.models import MAX_LEN, VOCAB, build_model, plain_logprobs, publish, save_model
from tests.parts.inference.recording import RecordingCapture

BYTES_PER_TOKEN = {"llama": 2 * 2 * 2 * 8 * 4, "gpt2": 2 * 2 * 4 * 8 * 4}
"""Layers, keys and values, heads, head size, float32."""


RECURRENT = {"qwen3_5_text"}
"""Kinds whose layers have states on the fast forward, too."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A model directory, and weights to publish: each number has its own file with different weights."""

    root: Path
    kind: str = "llama"

    @property
    def model_dir(self) -> Path:
        directory = self.root / f"model-{self.kind}"
        if not directory.exists():
            save_model(directory, self.kind)
        return directory

    def weights(self, number: int, *, epoch: int = 1) -> tuple[Publication, Path]:
        path = self.root / f"{self.kind}-{number}-{epoch}.safetensors"
        return publish(path, self.model(number), number, epoch=epoch), path

    def model(self, number: int) -> Any:
        return build_model(self.kind, seed=100 + number)

    @asynccontextmanager
    async def engine(
        self, name: str, *, published: int | None = 1, spans: SpanRecorder | None = None, **settings: Any
    ) -> AsyncIterator[Engine]:
        config = engine_config(name, **settings)
        async with open_engine(config, self.model_dir, spans=spans) as engine:
            if published is not None:
                await engine.load_weights(*self.weights(published))
            yield engine


def engine_config(name: str, **settings: Any) -> InferenceConfig:
    # A decode step of the scripted engine takes a millisecond, so that a test can act while a request runs.
    scripted = ScriptedConfig(vocab_size=VOCAB, max_model_len=MAX_LEN, token_s=0.001)
    return InferenceConfig.model_validate({"engine": name, "scripted": scripted, **settings})


async def next_step(engine: Engine) -> None:
    """Wait until the engine has run a step. A request must be waiting or running."""
    steps = engine.stats().steps
    await until(lambda: engine.stats().steps > steps)


async def until(is_true: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait for a condition that another thread or task fulfils."""
    async with asyncio.timeout(within_s):
        while not is_true():  # noqa: ASYNC110  # the counters of another thread have no event
            await asyncio.sleep(0.0005)


@asynccontextmanager
async def embedded(tiny: TinyModel, *, is_captured: bool = False, **settings: Any) -> AsyncIterator[TransformersEngine]:
    """`is_captured`: as on a GPU, with bucketed shapes. The fast forward has cache blocks, and plain calls instead of captured
    graphs; decode steps of a module, or over recurrent states, are recorded and repeated."""
    is_recorded = settings.get("forward") == "module" or tiny.kind in RECURRENT
    capture: Capture = RecordingCapture() if is_recorded else lambda operation: operation
    options: dict[str, Any] = {"capture": capture} if is_captured else {}
    async with open_embedded(engine_config("transformers", **settings), tiny.model_dir, **options) as engine:
        await engine.load_weights(*tiny.weights(1))
        yield engine


def some_prompts(count: int, shortest: int, longest: int, *, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def assert_faithful(tiny: TinyModel, prompt: list[int], completion: Completion, **changes: Any) -> None:
    tokens = [*prompt, *completion.token_ids.tolist()]
    expected = plain_logprobs(tiny.model(1), tokens, len(prompt), **changes)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
