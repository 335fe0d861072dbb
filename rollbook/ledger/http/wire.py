"""Responses of the ledger's server, and the types that its messages share. The requests are in `verbs.py`.

Types of `contracts` are sent as they are. A group travels as an encoded frame, which the ledger checks and stores as it is, next to
the fields that the ledger needs. Values that no store can keep (integers beyond 53 bits, NaN and infinity, strings with zero bytes)
are rejected here.
"""

import math
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from rollbook.contracts.admission import (
    OpenPart,
    Receipt,
    SampleCounts,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun, PassSplit
from rollbook.contracts.group import GroupOutcome, GroupState
from rollbook.contracts.group_codec import LARGEST

CONTENT_TYPE = "application/msgpack"
JSON_CONTENT_TYPE = "application/json"
FRAME_HEADER_BYTES = 8
"""Payloads are streamed one after the other, each preceded by its length as a big-endian integer of this size."""
MAX_WAIT_S = 60.0
"""Longest long-poll, below the idle limits of common proxies. A longer `wait_s` is allowed and answered after this time."""
MAX_GROUPS = 256
"""Groups in one `submit` request."""
MAX_LISTED = 1_000
"""Groups or outcomes in one response."""

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
MAX_TEXT = 10_000
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages. Unknown fields are rejected, so that a misspelt field is not ignored."""


_NUMBER = (int, float)  # made once: this runs for every number of every submitted group


def reject_unstorable(what: str, *values: Any) -> None:
    """Raises `ValueError` for integers beyond 53 bits, floats that are not finite and strings with zero bytes."""
    for value in values:
        # The common case first. NaN fails both comparisons.
        if value is None or (isinstance(value, _NUMBER) and -LARGEST <= value <= LARGEST):
            continue
        if isinstance(value, str) and "\x00" in value:
            raise ValueError(f"{what}: a string contains a zero byte")
        if isinstance(value, int):
            raise ValueError(f"{what}: {value} has more than 53 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what}: {value} is not a finite number")


_OUTCOME_NUMBERS = attrgetter(
    *(name for name in GroupOutcome.__dataclass_fields__ if name not in {"invalid_causes", "samples"})
)


def reject_unstorable_outcome(outcome: GroupOutcome) -> None:
    reject_unstorable("outcome", *_OUTCOME_NUMBERS(outcome))
    if outcome.invalid_causes:
        reject_unstorable("outcome", *outcome.invalid_causes, *outcome.invalid_causes.values())
    if outcome.samples:
        if len(outcome.samples) != outcome.num_samples:
            raise ValueError(f"outcome: {len(outcome.samples)} of {outcome.num_samples} samples are described")
        reject_unstorable("outcome", *chain.from_iterable(outcome.samples))


class ErrorReply(Message, frozen=True, kw_only=True):
    kind: str
    message: str


class HeartbeatReply(Message, frozen=True, kw_only=True):
    time: float
    """The ledger's clock, in seconds since 1970: a member on another machine measures the offset of its clock."""


class Announcement(Message, frozen=True, kw_only=True):
    """What a process that does not see the run directory needs to join the run."""

    directory_id: Name
    """Identifies the run directory."""
    version: Name
    """Rollbook version; processes of other versions are refused."""
    config: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    """The resolved configuration as TOML, without secrets."""
    addresses: Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=10_000)]], msgspec.Meta(max_length=16)]
    """URLs of the run's servers by role."""
    tokens: Annotated[dict[Name, Name], msgspec.Meta(max_length=4)]
    """Tokens of the run's servers, by the names of their files in the run directory."""
    tokenizer_digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """SHA-256 of the model's `tokenizer.json`; empty if it has none."""
    needs_env_token: bool = False
    """The environment server of the run requires a token that is not announced (`env.token`)."""


class JoinReply(Message, frozen=True, kw_only=True):
    owner: str


class SubmitError(Message, frozen=True, kw_only=True):
    """Why a group was refused; `status` and `kind` are those of an error response."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None


class SubmitResult(Message, frozen=True, kw_only=True):
    """Either a receipt or an error."""

    receipt: Receipt | None = None
    next_part: OpenPart | None = None
    """Only with batch policy `parts`: the part that the group lacks now."""
    error: SubmitError | None = None


class SubmitReply(Message, frozen=True, kw_only=True):
    results: tuple[SubmitResult, ...]
    """In the order of the groups."""


class ReceiptReply(Message, frozen=True, kw_only=True):
    receipt: str


class BatchReply(Message, frozen=True, kw_only=True):
    """`manifest` and `end` are null while there are not enough groups."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None
    split: PassSplit | None = None
    """How an earlier trainer split the batch into passes when it acknowledged the step."""


class AcknowledgeReply(Message, frozen=True, kw_only=True):
    receipt: AckReceipt


class ProducerView(Message, frozen=True, kw_only=True):
    name: str
    weight: float
    min_share: float
    credit: float
    """Groups that it was owed when the last batch was decided; negative if it received more than its share."""
    num_batched: int


class StepView(Message, frozen=True, kw_only=True):
    """One acknowledgement. A step that was trained again after a restart has one for each epoch."""

    step: int
    epoch: int
    digest: str
    receipt: AckReceipt
    at: float
    split: PassSplit | None
    """How the step was split into passes; null if its trainer reported none."""


class GroupView(Message, frozen=True, kw_only=True):
    """The record of a group, without its payload."""

    group_id: str
    task_id: str
    draw: int
    origin: str
    state: GroupState
    sequence: int
    opened_at: float
    attempt: int
    part: int
    num_samples: int
    expected_samples: int
    """The samples that the part was opened for, only with batch policy `parts`."""
    baseline: tuple[float, ...] | None
    owner: str | None
    producer: str | None
    admission_version: int | None
    publications: tuple[int, ...]
    oldest_version: int | None
    newest_version: int | None
    step: int | None
    drop_reason: str | None
    unusable: str | None
    payload_bytes: int
    has_payload: bool
    outcome: GroupOutcome | None


class ChangesView(Message, frozen=True, kw_only=True):
    """Groups that changed, as they are now. Changes of other runs are skipped, so a page may be empty and not the last."""

    next: int
    is_complete: bool
    groups: tuple[GroupView, ...]


class MoveView(Message, frozen=True, kw_only=True):
    at: float
    from_state: GroupState | None
    to_state: GroupState
    note: str
    by: str


class GroupHistory(Message, frozen=True, kw_only=True):
    """A group, its state changes, and an explanation of them in sentences."""

    group: GroupView
    moves: tuple[MoveView, ...]
    sentences: tuple[str, ...]


class AuditView(Message, frozen=True, kw_only=True):
    run_id: str
    ok: bool
    opened: int
    law: dict[str, int]
    dropped: dict[str, int]
    steps: int
    max_lag: int | None
    max_head_offpolicy_versions: int
    samples: SampleCounts | None
    """The law of samples, only with batch policy `parts`."""
    left_out: dict[str, int]
    """Sequences of scored samples that a setting leaves out of training, by reason."""
    violations: tuple[str, ...]
    known: int
    """Durable and dropped groups that an earlier audit of this server has checked. They were not read again."""
    known_at: float | None
    """When that audit ran, as Unix time."""


class Health(Message, frozen=True, kw_only=True):
    status: str
    runs: int
