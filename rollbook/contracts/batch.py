"""Values exchanged between trainer and ledger: role, batches, acknowledgements."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_checks import TrainingLimits, read_usable
from rollbook.contracts.policy import Publication
from rollbook.contracts.trajectory import RolloutSample, TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRole:
    """The trainer's fencing token and the progress of the run. A higher epoch fences all lower ones."""

    epoch: int
    restored_step: int
    last_decided: int
    """Batches up to this one exist. They must be replayed before a new one is decided."""
    last_acknowledged: int
    durable_step: int
    last_confirmed: Publication | None
    """The newest publication that any trainer confirmed. During replay nothing below its step is published."""
    limits: TrainingLimits = field(default_factory=TrainingLimits)
    """Groups outside of them are unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    group_id: GroupId
    sequence: int
    payload_digest: str
    oldest_version: int | None
    """Version of the oldest trained token that is not masked, as of the decision of the batch; None if the producer did not
    report it."""
    masked: tuple[int, ...] = ()
    """Trained tokens of these publications are masked out of the loss, because their effective version was below the cut when the
    batch was decided. -1: tokens of unknown publications. They stay in the context."""

    def is_masked(self, row: TokenRow) -> NDArray[np.bool_]:
        """For each token of a sequence of this group: whether it would be trained and is masked."""
        if not self.masked:
            return np.zeros(len(row), dtype=np.bool_)
        return row.loss_mask & np.isin(row.versions, self.masked)

    def masked_tokens(self, sample: RolloutSample) -> NDArray[np.bool_]:
        """For each token of a sample of this group that would be trained, in order: whether it is masked."""
        if not self.masked:
            return np.zeros(sample.num_trained, dtype=np.bool_)
        return np.concatenate([self.is_masked(row)[row.loss_mask] for row in sample.sequences])

    def is_first_turn_masked(self, sample: RolloutSample) -> bool:
        """Whether a sample of several turns has no trained token left in its first one."""
        if not self.masked or len(sample.turns) < 2:
            return False
        turn = sample.turns[0]
        row = sample.sequences[turn.sequence]
        trainable = row.loss_mask[turn.start : turn.end]
        return bool(trainable.any() and (self.is_masked(row)[turn.start : turn.end] == trainable).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """The groups of one step, decided once. `digest` covers their ids and payload digests, in order, and what is masked."""

    step: int
    entries: tuple[BatchEntry, ...]
    digest: str
    is_last: bool = False
    """The last batch of the data, possibly short."""
    cut: int | None = None
    """Trained tokens of lower effective versions are masked; `BatchEntry.masked` lists them. None: the policy masks no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSplit:
    """How a batch is split into passes. It decides the last bits of sums, so it is recorded with each trained step."""

    max_tokens: int
    """Computed tokens per pass; a longer sequence gets its own pass."""
    gradient_checkpointing: bool = False
    checkpointed_layers: int | None = None
    """With gradient checkpointing: of so many layers, from the first one on. None: of all."""

    @classmethod
    def of(cls, max_tokens: int, checkpointing: bool | int) -> "PassSplit":
        """`checkpointing`: as in the setting `trainer.gradient_checkpointing`."""
        is_counted = not isinstance(checkpointing, bool) and checkpointing > 0
        return cls(
            max_tokens=max_tokens,
            gradient_checkpointing=bool(checkpointing),
            checkpointed_layers=checkpointing if is_counted else None,
        )

    @property
    def checkpointing(self) -> bool | int:
        """The setting `trainer.gradient_checkpointing`."""
        return self.checkpointed_layers or True if self.gradient_checkpointing else False

    @property
    def checkpoints_all(self) -> bool:
        return self.gradient_checkpointing and self.checkpointed_layers is None

    def __str__(self) -> str:
        layers = "" if self.checkpointed_layers is None else f" of {self.checkpointed_layers} layers"
        return (
            f"passes of {self.max_tokens} tokens{f' and checkpointing{layers}' if self.gradient_checkpointing else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """A manifest with its decoded usable groups, in the same order.

    Which groups are usable depends only on their payloads and the run's limits, so a replay trains the same ones.
    """

    manifest: BatchManifest
    groups: tuple[PromptGroup, ...]
    unusable: Mapping[GroupId, str] = field(default_factory=dict)
    """Groups that cannot be trained, with the reason. They have weight 0."""
    split: PassSplit | None = None
    """The split with which the step was acknowledged last. None: it was not, or its trainer reported none."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def entries(self) -> Iterator[tuple[BatchEntry, PromptGroup]]:
        """The usable groups, each with its entry in the manifest."""
        usable = [entry for entry in self.manifest.entries if entry.group_id not in self.unusable]
        return zip(usable, self.groups, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """A batch as the ledger sends it: the manifest with the payloads of its groups, in the same order."""

    manifest: BatchManifest
    payloads: tuple[bytes, ...] = field(repr=False)
    limits: TrainingLimits
    split: PassSplit | None = None
    """See `TrainingBatch.split`."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def decode(self) -> TrainingBatch:
        usable: list[PromptGroup] = []
        unusable: dict[GroupId, str] = {}
        for entry, payload in zip(self.manifest.entries, self.payloads, strict=True):
            found = read_usable(payload, entry.group_id, self.limits)
            if isinstance(found, str):
                unusable[entry.group_id] = found
            else:
                usable.append(found)
        return TrainingBatch(manifest=self.manifest, groups=tuple(usable), unusable=unusable, split=self.split)


class EndOfRun(StrEnum):
    """Why there are no more batches."""

    MAX_STEPS = "max_steps"
    END_OF_DATA = "end_of_data"
    STOPPED = "stopped"


class AckReceipt(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    REPEATED = "repeated"
    """Already acknowledged with the same digest."""
    DIVERGED = "diverged"
    """Already acknowledged with another digest. Recorded; tokens sampled by the lost weights count as older."""
