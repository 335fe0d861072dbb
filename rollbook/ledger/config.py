"""What an operator may set about admission, batches and the store."""

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, SecretStr, model_validator

from rollbook.contracts.admission import EndOfDataRule, RunSettings
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule


class Durability(StrEnum):
    POWER_LOSS = "power_loss"
    """What was answered survives a power cut: every commit is synced."""
    PROCESS_CRASH = "process_crash"
    """What was answered survives the death of any process. A power cut may take the last moments, never a decided batch."""


class GateConfig(BaseModel, frozen=True, extra="forbid"):
    """How groups are admitted and how they become batches."""

    groups_per_step: int = Field(default=8, ge=1)
    """P: prompt groups in one training step. Fixed for the life of a run."""

    max_groups_in_flight: int = Field(default=16, ge=1)
    """C: prompt groups being played at the same time, at most. May be smaller than a step: it then fills in several rounds."""

    max_head_offpolicy_versions: int = Field(default=1, ge=0)
    """O: the staleness bound, in steps. No trained token is older than this; 0 is strictly synchronous.
    Fixed for the life of a run."""

    batch_policy: BatchPolicy = BatchPolicy.WAIT
    """`wait`: in order of admission, slow tasks are trained too. `drop`: in order of arrival, what is too old is dropped.
    Fixed for the life of a run."""

    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds a group may be played before it gets another attempt. Keep it above the slowest episode."""

    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts (released or out of time) after which a group is dropped."""

    owner_ttl_s: float = Field(default=30.0, gt=0)
    """Seconds of silence after which a dispatcher counts as gone and its groups go to another attempt."""

    end_of_data: EndOfDataRule = EndOfDataRule.SHORT_BATCH
    """What becomes of the last groups when they do not fill a step: one short batch, or dropped."""

    def settings(self, *, max_steps: int | None = None, keep_payloads: bool = True) -> RunSettings:
        """The same, as the ledger is told when the run is created."""
        return RunSettings(
            rule=FreshnessRule(
                groups_per_step=self.groups_per_step,
                max_in_flight=self.max_groups_in_flight,
                max_head_offpolicy_versions=self.max_head_offpolicy_versions,
                policy=self.batch_policy,
                max_steps=max_steps,
            ),
            group_deadline_s=self.group_deadline_s,
            max_attempts=self.max_attempts,
            owner_ttl_s=self.owner_ttl_s,
            end_of_data=self.end_of_data,
            keep_payloads=keep_payloads,
        )


class LedgerConfig(BaseModel, frozen=True, extra="forbid"):
    """Where groups wait and how safely."""

    durability: Durability = Durability.POWER_LOSS
    """What an answered call survives: `power_loss`, or only `process_crash` (faster on slow disks).
    Decided batches survive both."""

    max_queued_groups: int = Field(default=100_000, ge=1)
    """External groups are refused (429, try later) while this many are queued. At least a step's worth. Groups that the gate
    admitted are always taken: the gate bounds them."""

    max_queued_mb: float = Field(default=16_384.0, gt=0)
    """External groups are refused (429, try later) while their payloads would make the queue larger than this many megabytes."""

    max_body_mb: float = Field(default=256.0, gt=0)
    """Megabytes of one request, unpacked, at most. A group of 64 samples of 32,000 tokens takes about 27."""

    max_receiving_mb: float = Field(default=1024.0, gt=0)
    """Megabytes of requests that are still arriving, of all clients together. More are asked to come back later (503), so that
    many slow clients cannot fill the memory. At least `max_body_mb`."""

    body_s: float = Field(default=60.0, gt=0)
    """Seconds within which the body of a request must have arrived."""

    request_s: float = Field(default=120.0, gt=0)
    """Seconds that a client keeps trying to reach the ledger in one call: enough for the ledger to be restarted. The one retry
    there is: when it is over, the process that asked ends, and the supervisor starts it again."""

    keep_payloads: bool = True
    """Keep the tokens of trained groups for replay and browsing. Otherwise they go once no kept checkpoint needs them."""

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_receiving_mb < self.max_body_mb:
            raise ValueError(
                f"max_receiving_mb is {self.max_receiving_mb:g} and max_body_mb {self.max_body_mb:g}: the largest body would "
                "never be taken; raise the first or lower the second"
            )
        return self


class LedgerServerConfig(BaseModel, frozen=True, extra="forbid"):
    """A ledger that is run on its own."""

    store: str = "sqlite:///ledger"
    """Where the record lies: `sqlite:///DIRECTORY`, or `postgresql://…` shared by several replicas."""

    host: str = "127.0.0.1"
    """Where to listen. Anywhere but loopback, each role needs a token."""

    port: int = Field(default=8000, ge=0, le=65535)
    """0 lets the system choose; the ready file tells which."""

    producer_tokens: tuple[SecretStr, ...] = ()
    """Who may open and submit groups."""

    trainer_tokens: tuple[SecretStr, ...] = ()
    """Who may create runs, take batches and acknowledge them."""

    viewer_tokens: tuple[SecretStr, ...] = ()
    """Who may look."""

    ready_file: Path | None = None
    """Written once the ledger answers, with its address."""

    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that calls under way get to end when the ledger is asked to stop."""

    ledger: LedgerConfig = LedgerConfig()
    """Durability and bounds."""
