"""Opens either engine over one tiny model, for tests that apply to both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.contracts.policy import Publication
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import Engine, open_engine
from rollbook.telemetry.spans import SpanRecorder
from tests.parts.inference.models import MAX_LEN, VOCAB, build_model, publish, save_model


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
