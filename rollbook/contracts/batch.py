"""What the trainer and the ledger say to each other: role, batches, acknowledgements."""

from dataclasses import dataclass
from enum import StrEnum

from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRole:
    """The trainer's fencing token and where the ledger stands. A higher epoch shuts out every lower one."""

    epoch: int
    restored_step: int
    last_decided: int
    """Batches up to this one exist and must be replayed before a new one is decided."""
    last_acknowledged: int
    durable_step: int
    last_confirmed: Publication | None
    """The newest publication any incarnation confirmed. Nothing below its step is published while replaying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    group_id: GroupId
    sequence: int
    payload_digest: str
    oldest_version: int | None
    """Effective version of the oldest trained token when the batch was decided; None where the producer did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """The composition of one step, decided once. `digest` covers ids and payload digests, in order."""

    step: int
    entries: tuple[BatchEntry, ...]
    digest: str
    is_last: bool = False
    """A short batch at the end of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """A manifest with its groups, in the manifest's order."""

    manifest: BatchManifest
    groups: tuple[PromptGroup, ...]

    @property
    def step(self) -> int:
        return self.manifest.step


class EndOfRun(StrEnum):
    """Why there is no further batch."""

    MAX_STEPS = "max_steps"
    END_OF_DATA = "end_of_data"
    STOPPED = "stopped"


class AckReceipt(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    REPEATED = "repeated"
    """Acknowledged before, with the same digest."""
    DIVERGED = "diverged"
    """Acknowledged before, with another digest: recorded, and tokens of the lost lineage are judged accordingly."""
