"""Train recorded batches again and return the weight digests. Writes nothing.

On the same kind of processor or GPU, with the same version of torch and the recorded number of threads, the digests equal those of
the recorded run, however often it was killed. A run whose
settings changed when it was resumed is replayed by period: each step with the settings that it was trained with.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.checkpoints.settings_history import SettingsHistory, SettingsPeriod
from rollbook.trainer.config import SPLIT_SETTINGS, TrainerConfig
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.step import TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    final_digest: str
    digests: Mapping[int, str]
    """Digest of the weights after each step; step 0 is the initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A recorded batch was trained again."""

    step: int
    seconds: float
    is_equal: bool | None = None
    """Whether its weights have the recorded digest. None: not compared."""


OnStep = Callable[[ReplayedStep], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPeriod:
    """The settings of the steps after `after_step`, up to the next period."""

    after_step: int = 0
    config: TrainerConfig


def replay_periods(history: SettingsHistory, current: TrainerConfig, *, until: int) -> list[ReplayPeriod]:
    """The settings of each period up to a step. Raises `RunError` that names the setting and the steps which cannot be replayed."""
    ends = [*(period.after_step for period in history.periods[1:]), until]
    return [
        ReplayPeriod(after_step=period.after_step, config=_config_of(period, current, last=min(end, until)))
        for period, end in zip(history.periods, ends, strict=False)
        if period.after_step < until
    ] or [ReplayPeriod(config=current)]


def _config_of(period: SettingsPeriod, current: TrainerConfig, *, last: int) -> TrainerConfig:
    steps = f"steps {period.after_step + 1} to {last}"
    now = current.numeric_settings()
    changed = {name: value for name, value in period.settings.items() if now.get(name) != value}
    try:
        config = _recorded_config(current, changed)
    except ValidationError as error:
        faults = "; ".join(f"trainer.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise RunError(
            f"{steps} cannot be replayed: this version does not accept the settings that they were trained with: {faults}"
        ) from error
    found = config.numeric_settings()
    others = [name for name in changed if found.get(name) != changed[name]]
    if others:
        raise RunError(
            f"{steps} cannot be replayed: they were trained with "
            + ", ".join(f"trainer.{name} = {changed[name]!r}, which is {found.get(name)!r} now" for name in others)
        )
    if config.ranks > 1:
        raise RunError(f"{steps} cannot be replayed: trainer.ranks was {config.ranks}, and a replay has one process")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RunError(f"{steps} cannot be replayed: trainer.device was cuda, and this machine has no CUDA device")
    return config.model_copy(update={"shards_path": None})


def _recorded_config(current: TrainerConfig, changed: Mapping[str, Any]) -> TrainerConfig:
    """The settings with other values. The recorded ones are effective values: the default of a loss may be no valid setting."""
    table = {**current.model_dump(mode="json"), **changed}
    try:
        return TrainerConfig.model_validate(table)
    except ValidationError as error:
        refused = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]} & TrainerConfig.model_fields.keys()
        if not refused:
            raise
        return TrainerConfig.model_validate({**table, **dict.fromkeys(refused)})


class _Learners:
    """The learner of each step. Where a period ends, the next one continues from a checkpoint, as the resumed run did."""

    def __init__(self, periods: Sequence[ReplayPeriod], model_dir: Path, *, publishes_adapters: bool = False) -> None:
        self._periods = list(periods)
        self._model_dir = model_dir
        self._publishes_adapters = publishes_adapters
        self.learner = self._prepared(initial_learner(model_dir, periods[0].config))

    def of_step(self, step: int) -> TrainStep:
        while len(self._periods) > 1 and step > self._periods[1].after_step:
            ended = self._periods.pop(0)
            with tempfile.TemporaryDirectory(prefix="rollbook-replay-") as folder:
                saving = Checkpoints(Path(folder), model_dir=self._model_dir, config=ended.config)
                checkpoint = saving.save(self.learner, weights_digest=self.learner.model.digest())
                restoring = Checkpoints(Path(folder), model_dir=self._model_dir, config=self._periods[0].config)
                self.learner = self._prepared(restoring.restore(checkpoint))
        return self.learner

    def _prepared(self, learner: TrainStep) -> TrainStep:
        if self._publishes_adapters:
            learner.publish_adapters()
        return learner


async def replay(
    batches: Iterable[TrainingBatch] | AsyncIterable[TrainingBatch],
    *,
    model_dir: Path,
    config: TrainerConfig | Sequence[ReplayPeriod],
    until: int | None = None,
    publishes_adapters: bool = False,
    recorded: Mapping[int, str] | None = None,
    on_step: OnStep | None = None,
) -> ReplayResult:
    """Train the recorded batches in order from the initial weights in `model_dir`, up to step `until`.

    `config`: the settings, or those of each period. `publishes_adapters`: the run published adapters only, so its digests are
    digests of the adapters. `recorded`: weights that were recorded in another form, adapters or merged, count as equal.
    """
    periods = [ReplayPeriod(config=config)] if isinstance(config, TrainerConfig) else config
    learners = await asyncio.to_thread(_Learners, periods, model_dir, publishes_adapters=publishes_adapters)
    digests = {0: await asyncio.to_thread(learners.learner.model.digest)}
    last = 0
    async for batch in _stream(batches):
        if until is not None and batch.step > until:
            break
        started = time.perf_counter()
        learner = await asyncio.to_thread(learners.of_step, batch.step)
        await asyncio.to_thread(learner.run, batch)
        last, digests[batch.step] = batch.step, await asyncio.to_thread(learner.model.digest)
        known = None if recorded is None else recorded.get(batch.step)
        if known is not None and known != digests[last] and await asyncio.to_thread(learner.model.has_digest, known):
            digests[last] = known
        if on_step is not None:
            is_equal = None if known is None else known == digests[last]
            on_step(ReplayedStep(step=last, seconds=time.perf_counter() - started, is_equal=is_equal))
    return ReplayResult(final_digest=digests[last], digests=digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterfactualStep:
    """One recorded batch under other settings. `gain` is measured before the batch is trained."""

    step: int
    gain: float | None
    metrics: Mapping[str, float | None]


async def retrain(
    batches: Iterable[TrainingBatch],
    *,
    model_dir: Path,
    config: TrainerConfig | Sequence[ReplayPeriod],
    judged_by: TrainerConfig,
    on_step: OnStep | None = None,
) -> tuple[list[CounterfactualStep], str]:
    """Train a recorded stream with the settings of `config`, without generation. Returns the steps and the final digest.

    Gains use the advantages of `judged_by`, on batches not trained yet, so that runs with different settings can be compared.
    Batches are split as recorded, unless `config` sets another split than `judged_by`.
    """
    periods = [ReplayPeriod(config=config)] if isinstance(config, TrainerConfig) else config
    last = periods[-1].config
    keeps_splits = all(getattr(last, name) == getattr(judged_by, name) for name in SPLIT_SETTINGS)
    learners = await asyncio.to_thread(_Learners, periods, model_dir)
    steps: list[CounterfactualStep] = []
    for batch in batches:
        started = time.perf_counter()
        learner = await asyncio.to_thread(learners.of_step, batch.step)
        gain = await asyncio.to_thread(learner.gain, flatten(batch, judged_by))
        report = await asyncio.to_thread(learner.run, batch if keeps_splits else replace(batch, split=None))
        steps.append(CounterfactualStep(step=batch.step, gain=gain, metrics=report.metrics))
        if on_step is not None:
            on_step(ReplayedStep(step=batch.step, seconds=time.perf_counter() - started))
    return steps, await asyncio.to_thread(learners.learner.model.digest)


async def _stream(batches: Iterable[TrainingBatch] | AsyncIterable[TrainingBatch]) -> AsyncIterator[TrainingBatch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
