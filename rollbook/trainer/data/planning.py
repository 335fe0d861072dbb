"""A batch as the training loop uses it: split into passes, with everything that is reported about its rollouts.

Imports no torch, so that a process which only plans starts quickly and stays small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollbook.contracts.batch import BatchManifest, EncodedBatch, PassSplit, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, PlanSettings, plan_rows
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.metrics import MaskReport, batch_metrics


class UnplannableBatchError(RunError):
    """The batch cannot be trained with this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample that is shown to people, with its advantage."""

    group_id: GroupId
    task_id: TaskId
    number: int
    """In its group."""
    sample: RolloutSample
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch split into passes, with the metrics that do not depend on training."""

    manifest: BatchManifest
    unusable: Mapping[GroupId, str]
    """Groups that cannot be trained, with the reason."""
    minibatches: Sequence[Minibatch]
    masks: MaskReport
    metrics: Mapping[str, float | None]
    shown: Sequence[ShownSample]
    split: PassSplit
    recorded_split: PassSplit | None = None
    """The split with which an earlier trainer acknowledged the step."""
    batch: TrainingBatch | None = None
    """The decoded batch, for steps whose tokens are recorded."""

    @property
    def step(self) -> int:
        return self.manifest.step

    @classmethod
    def of(
        cls,
        encoded: EncodedBatch,
        settings: PlanSettings,
        *,
        split: PassSplit | None = None,
        num_shown: int = 0,
        keeps_batch: bool = False,
    ) -> "PlannedBatch":
        """`split`: None for that of the settings. `num_shown`: how many samples are shown to people."""
        batch = encoded.decode()
        settings = settings.with_split(split)
        masks = MaskReport.of(batch)
        return cls(
            manifest=batch.manifest,
            unusable=batch.unusable,
            minibatches=plan_rows(flatten(batch, settings.config), settings, step=batch.step),
            masks=masks,
            metrics={**batch_metrics(batch), **masks.metrics()},
            shown=shown_samples(batch, settings.config, num_shown),
            split=settings.split,
            recorded_split=encoded.split,
            batch=batch if keeps_batch else None,
        )


def shown_samples(batch: TrainingBatch, config: TrainerConfig, count: int) -> list[ShownSample]:
    """Samples spread over the batch, so that several groups are shown."""
    samples = [(group, number, sample) for group in batch.groups for number, sample in enumerate(group.samples)]
    count = min(count, len(samples))
    advantages = credit(batch, config).by_sample if count else ()
    return [
        ShownSample(
            group_id=group.id, task_id=group.task_id, number=number, sample=sample, advantage=float(advantages[at])
        )
        for at in (index * len(samples) // count for index in range(count))
        for group, number, sample in [samples[at]]
    ]
