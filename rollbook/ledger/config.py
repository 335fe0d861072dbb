"""Settings of admission, batches and the store."""

from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, Secret, SecretStr, model_validator

from rollbook.contracts.admission import EndOfDataRule, RunSettings
from rollbook.contracts.freshness import AdmissionShare, BatchPolicy, FreshnessRule
from rollbook.contracts.group_checks import TrainingLimits


class Durability(StrEnum):
    POWER_LOSS = "power_loss"
    """Acknowledged data survives a power failure: every commit is synced."""
    PROCESS_CRASH = "process_crash"
    """Acknowledged data survives the crash of any process. A power failure may lose the last moments, never a decided batch."""


class GateConfig(BaseModel, frozen=True, extra="forbid"):
    """Admission of groups and forming of batches."""

    groups_per_step: int = Field(default=8, ge=1)
    """P: prompt groups in one training step. Fixed for the whole run."""

    max_groups_in_flight: int = Field(default=16, ge=1)
    """C: maximum number of prompt groups played concurrently. May be smaller than a step. 16, or fewer for coding agents on
    few cores."""

    max_head_offpolicy_versions: int = Field(default=1, ge=0)
    """O: the staleness bound, in steps. No trained token is older than this; 0 is strictly synchronous.
    Fixed for the whole run."""

    batch_policy: BatchPolicy = BatchPolicy.PARTS
    """`wait`: in order of admission, so slow tasks are trained too; the trainer waits for them. `drop`: in order of arrival; stale
    groups are dropped. `trim`: what has arrived, in order of admission; stale tokens are masked. `parts`: as `trim`, but a group
    arrives in parts as its samples finish, so no sample waits for a slower one. Where groups arrive whole (an Atropos source,
    `rollout.oversample`), the default is `wait`. See docs/staleness.md. Fixed for the whole run."""

    admission_share: AdmissionShare = AdmissionShare.HALF
    """With batch policy `wait` and a staleness bound above 2: how much of the bound admission uses. `half`: younger groups may
    overtake a slow one within the other half, so the trainer waits less for it. `whole`: the formula of published asynchronous
    recipes; more groups start, and none overtakes. Other policies and smaller bounds use the whole bound in both cases. Fixed for
    the whole run."""

    group_deadline_s: float = Field(default=600.0, gt=0)
    """Maximum seconds of one attempt at a group; then it gets another attempt. Set it above the slowest episode."""

    max_attempts: int = Field(default=3, ge=1)
    """Number of failed attempts (released or timed out) after which a group is dropped."""

    owner_ttl_s: float = Field(default=30.0, gt=0)
    """Seconds without a heartbeat after which a dispatcher is timed out and its groups get another attempt."""

    end_of_data: EndOfDataRule = EndOfDataRule.SHORT_BATCH
    """Whether the last groups, if they do not fill a step, become a short batch or are dropped."""

    def settings(
        self,
        *,
        max_steps: int | None = None,
        keep_payloads: bool = True,
        limits: TrainingLimits | None = None,
        samples_per_group: int = 1,
        quorum: int | None = None,
        directory_id: str = "",
    ) -> RunSettings:
        """The settings with which the run is created in the ledger. Batch policy `parts` needs samples and quorum."""
        return RunSettings(
            rule=FreshnessRule(
                groups_per_step=self.groups_per_step,
                max_in_flight=self.max_groups_in_flight,
                max_head_offpolicy_versions=self.max_head_offpolicy_versions,
                policy=self.batch_policy,
                max_steps=max_steps,
                samples_per_group=samples_per_group,
                quorum=quorum,
                admission_share=self.admission_share,
            ),
            group_deadline_s=self.group_deadline_s,
            max_attempts=self.max_attempts,
            owner_ttl_s=self.owner_ttl_s,
            limits=limits or TrainingLimits(),
            end_of_data=self.end_of_data,
            keep_payloads=keep_payloads,
            directory_id=directory_id,
        )


class LedgerConfig(BaseModel, frozen=True, extra="forbid"):
    """Durability and limits of the ledger."""

    durability: Durability = Durability.POWER_LOSS
    """Which failure acknowledged data survives: `power_loss`, or only `process_crash` (faster on slow disks).
    Decided batches survive both."""

    max_queued_groups: int = Field(default=100_000, ge=1)
    """External groups are refused (429, retry later) while this many are queued. At least `groups_per_step`. Groups with a grant
    are never refused: the gate limits them."""

    max_queued_mb: float = Field(default=16_384.0, gt=0)
    """External groups are refused (429, retry later) if their payloads would make the queue larger than this many megabytes."""

    max_body_mb: float = Field(default=256.0, gt=0)
    """Maximum uncompressed megabytes of one request. A group of 64 samples of 32,000 tokens takes about 27."""

    max_receiving_mb: float = Field(default=1024.0, gt=0)
    """Maximum megabytes of all requests that are being received. Further requests are refused (503, retry later), so that many
    slow clients cannot fill the memory. At least `max_body_mb`."""

    body_s: float = Field(default=60.0, gt=0)
    """Maximum seconds to receive the body of a request."""

    request_s: float = Field(default=120.0, gt=0)
    """Maximum seconds that a client retries one call: enough for a restart of the ledger. There is no other retry: after that,
    the calling process ends and the supervisor restarts it."""

    keep_payloads: bool = True
    """Keep the tokens of trained groups for replay and browsing. Otherwise they are deleted when no kept checkpoint needs them."""

    payloads: str | None = Field(default=None, pattern=r"^(/|s3://[^/])")
    """With a PostgreSQL store: where the tokens of groups are stored, with their digests in the rows: a directory that all replicas
    of the ledger see, or `s3://bucket/prefix` (`pip install '.[s3]'`). None: in the database."""

    @model_validator(mode="after")
    def _check_receiving_limit(self) -> Self:
        if self.max_receiving_mb < self.max_body_mb:
            raise ValueError(
                f"max_receiving_mb is {self.max_receiving_mb:g} and max_body_mb {self.max_body_mb:g}: the largest body could "
                "never be received; raise the first or lower the second"
            )
        return self


class StoreUrl(Secret[str]):
    """The URL of a store. It is displayed without its password."""

    def _display(self) -> str:
        url = self.get_secret_value()
        password = urlsplit(url).password
        return url if password is None else url.replace(f":{password}@", ":***@", 1)


class RunLedgerConfig(LedgerConfig, frozen=True, extra="forbid"):
    """The ledger of a run: where it is stored, its durability and its limits."""

    store: StoreUrl | None = None
    """URL of the store, such as `postgresql://USER@HOST/DATABASE`, which several runs may share. Without one, the run directory
    holds the ledger, in SQLite. A password belongs in `~/.pgpass` or in the variable PGPASSWORD; one in the URL is written to the
    private `config.toml` of the run directory and never displayed."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/]")
    """URL of a running ledger service (`rollbook ledger serve`), or of several replicas of it on one PostgreSQL database, separated
    by commas: clients use one until it does not respond, then the next. The run then starts no ledger process."""

    token_file: Path | None = None
    """File with the token of the service at `url`. It must open the requests of producers and of the trainer."""

    @model_validator(mode="after")
    def _check_location(self) -> Self:
        if self.url is not None and self.store is not None:
            raise ValueError("store and url exclude each other: the service at url has its own store; remove one")
        if self.url is None and self.token_file is not None:
            raise ValueError("token_file is read with url only; the run's own ledger uses the access token of the run")
        if self.payloads is not None and not self.is_shared:
            raise ValueError("payloads needs a PostgreSQL store: set store, or remove payloads")
        unread = [name for name in SERVICE_SETTINGS if getattr(self, name) != LedgerConfig.model_fields[name].default]
        if self.url is not None and unread:
            raise ValueError(f"{', '.join(unread)}: not read with url; set it where the service is started")
        return self

    @property
    def is_shared(self) -> bool:
        """Whether the ledger may hold other runs, and is reached from other machines."""
        return self.url is not None or (
            self.store is not None and not self.store.get_secret_value().startswith("sqlite:")
        )


SERVICE_SETTINGS = (
    "durability",
    "max_queued_groups",
    "max_queued_mb",
    "max_body_mb",
    "max_receiving_mb",
    "body_s",
    "payloads",
)
"""Settings that the process of the ledger reads."""


class LedgerServerConfig(BaseModel, frozen=True, extra="forbid"):
    """A ledger that runs as a separate service."""

    store: str = "sqlite:///ledger"
    """URL of the store: `sqlite:///DIRECTORY`, or `postgresql://…` shared by several replicas."""

    host: str = "127.0.0.1"
    """Address to listen on. On any address but loopback, each role needs a token."""

    port: int = Field(default=8000, ge=0, le=65535)
    """0 lets the system choose; the ready file contains the choice."""

    token_file: Path | None = None
    """File with a token for all requests. Without tokens by role, a ledger on loopback requires it for those of a trainer only."""

    producer_tokens: tuple[SecretStr, ...] = ()
    """Tokens of clients that open and submit groups."""

    trainer_tokens: tuple[SecretStr, ...] = ()
    """Tokens of clients that create runs, take batches and acknowledge them."""

    viewer_tokens: tuple[SecretStr, ...] = ()
    """Tokens of clients that only read."""

    operator_tokens: tuple[SecretStr, ...] = ()
    """Tokens of operators, who read and act on runs. Optional: tokens of trainers allow the same."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names under which clients reach the ledger, such as a DNS name. Requests with another `Host` header are refused."""

    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the ledger, such as `https://app.example`; `*` allows all."""

    ready_file: Path | None = None
    """Written with the address when the ledger is ready."""

    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that running calls get to finish when the ledger stops."""

    ledger: LedgerConfig = LedgerConfig()
    """Durability and limits."""
