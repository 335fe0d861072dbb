"""What crosses between the ledger's server and its clients: one struct a request, MessagePack bodies (JSON for people).

Words of `contracts` are sent as they are; a group travels as the opaque frame of `contracts.group_codec`, with everything that the
ledger has to know of it beside it. What no store could keep (numbers beyond 53 bits, numbers that are none, texts with zero bytes)
is refused here, so that nobody behind this line meets it.
"""

import math
from operator import attrgetter
from typing import Annotated

import msgspec

from rollbook.contracts.admission import RunSettings
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun
from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw

CONTENT_TYPE = "application/msgpack"
JSON_CONTENT_TYPE = "application/json"
FRAME_HEADER_BYTES = 8
"""Payloads are streamed one after the other, each behind its length as a big-endian integer of this size."""
LARGEST = 2**53 - 1
"""The largest integer that every store, and every reader of JSON, keeps exactly."""
MOST_WAIT_S = 60.0
"""Longest long-poll: below the idle limits of common proxies. Asking for more is no mistake, it is answered earlier."""

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Stamp = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)]
"""A publication; -1 stands for unknown."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of all. Unknown fields are refused: a misspelt one must not be ignored."""


_NUMBERS = frozenset({int, float})


def _refuse_unstorable(what: str, *values: object) -> None:
    """Numbers that are none or too large, and zero bytes in texts: raised as `ValueError`, told as a bad field."""
    for value in values:
        # What is usual is seen at a glance; a number that is none is neither smaller nor larger than anything.
        if value is None or (type(value) in _NUMBERS and -LARGEST <= value <= LARGEST):  # type: ignore[operator]
            continue
        if isinstance(value, str) and "\x00" in value:
            raise ValueError(f"{what}: a text contains a zero byte")
        if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            raise ValueError(f"{what}: {value} has more than 53 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what}: {value} is not a number that can be kept")


_NUMBERS_OF_OUTCOME = attrgetter(*(name for name in GroupOutcome.__dataclass_fields__ if name != "invalid_causes"))


def _refuse_unstorable_outcome(outcome: GroupOutcome) -> None:
    _refuse_unstorable("outcome", *_NUMBERS_OF_OUTCOME(outcome))
    if outcome.invalid_causes:
        _refuse_unstorable("outcome", *outcome.invalid_causes, *outcome.invalid_causes.values())


class ErrorReply(Message, frozen=True, kw_only=True):
    kind: str
    message: str


class CreateRun(Message, frozen=True, kw_only=True):
    settings: RunSettings

    def __post_init__(self) -> None:
        settings, rule = self.settings, self.settings.rule
        spans = (settings.group_deadline_s, settings.owner_ttl_s)
        _refuse_unstorable("settings", *spans, settings.max_attempts)
        _refuse_unstorable("settings", rule.groups_per_step, rule.max_in_flight, rule.budget, rule.max_steps)
        if min(spans) <= 0 or settings.max_attempts < 1:
            raise ValueError("settings: deadline and time-to-live must be above 0, and there is at least one attempt")
        if rule.max_steps is not None and rule.max_steps < 0:
            raise ValueError(f"settings: max_steps is {rule.max_steps}; it must be >= 0")


class Join(Message, frozen=True, kw_only=True):
    owner_name: Name
    nonce: Name
    """The same in every repeat of one request."""


class Joined(Message, frozen=True, kw_only=True):
    owner: str


class Open(Message, frozen=True, kw_only=True):
    owner: Name
    draws: tuple[Draw, ...]
    limit: Count
    wait_s: Seconds
    request_id: Name
    """The same in every repeat of one request."""

    def __post_init__(self) -> None:
        for draw in self.draws:
            _refuse_unstorable("draw", draw.task_id, draw.number, draw.position)


class Heartbeat(Message, frozen=True, kw_only=True):
    owner: Name


class Submit(Message, frozen=True, kw_only=True):
    group_id: Name
    task_id: Name
    draw: Count
    attempt: Count
    publications: tuple[Stamp, ...]
    outcome: GroupOutcome
    drop: Text | None = None
    payload: bytes
    payload_digest: Name
    producer: Name | None = None
    """The registered producer it comes from, for a group that the gate did not grant."""

    def __post_init__(self) -> None:
        _refuse_unstorable("group", self.group_id, self.task_id, self.drop)
        _refuse_unstorable_outcome(self.outcome)


class SubmitView(Submit, frozen=True, kw_only=True):
    """The same, its payload a view into the request: what is only handed on need not be copied."""

    payload: memoryview  # type: ignore[assignment]  # reads like bytes wherever a submission is stored


MOST_GROUPS = 256
"""In one request."""


class SubmitMany(Message, frozen=True, kw_only=True):
    """Several groups, each judged by itself. A message that cannot be read is refused as a whole."""

    groups: Annotated[tuple[Submit, ...], msgspec.Meta(max_length=MOST_GROUPS)]


class SubmitManyView(Message, frozen=True, kw_only=True):
    groups: Annotated[tuple[SubmitView, ...], msgspec.Meta(max_length=MOST_GROUPS)]


class Refused(Message, frozen=True, kw_only=True):
    """What the same group would have been answered in a request of its own."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None


class SubmitAnswer(Message, frozen=True, kw_only=True):
    """One of both."""

    receipt: str | None = None
    refused: Refused | None = None


class SubmittedMany(Message, frozen=True, kw_only=True):
    answers: tuple[SubmitAnswer, ...]
    """In the order of the groups."""


class Close(Message, frozen=True, kw_only=True):
    group_id: Name
    reason: Text
    outcome: GroupOutcome | None = None

    def __post_init__(self) -> None:
        _refuse_unstorable("group", self.group_id, self.reason)
        if self.outcome is not None:
            _refuse_unstorable_outcome(self.outcome)


class Receipted(Message, frozen=True, kw_only=True):
    receipt: str


class Release(Message, frozen=True, kw_only=True):
    group_id: Name
    attempt: Count
    cause: Text

    def __post_init__(self) -> None:
        _refuse_unstorable("release", self.cause)


class TakeRole(Message, frozen=True, kw_only=True):
    restored_step: Count


class Batch(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    wait_s: Seconds


class BatchReply(Message, frozen=True, kw_only=True):
    """Both None: not enough groups yet."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None


class Payloads(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count


class Acknowledge(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    weights_digest: Name


class Acknowledged(Message, frozen=True, kw_only=True):
    receipt: AckReceipt


class Register(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    weights_digest: Name


class Confirm(Message, frozen=True, kw_only=True):
    publication: Publication
    epoch: Count

    def __post_init__(self) -> None:
        told = self.publication
        _refuse_unstorable("publication", told.id, told.epoch, told.step, told.digest)


class Checkpointed(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    oldest_kept: Count


class Finish(Message, frozen=True, kw_only=True):
    reason: EndOfRun
    epoch: Count


class Empty(Message, frozen=True, kw_only=True):
    """Nothing to say: the verb is all."""


class RegisterProducer(Message, frozen=True, kw_only=True):
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    """Its part of a batch beside other producers."""
    min_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """The part of a batch that it has whenever it has groups ready."""


class ProducerView(Message, frozen=True, kw_only=True):
    name: str
    weight: float
    min_share: float
    credit: float
    """Groups that it was owed when the last batch was decided."""
    num_batched: int


class GroupView(Message, frozen=True, kw_only=True):
    """A group without its tokens."""

    group_id: str
    task_id: str
    draw: int
    origin: str
    state: str
    sequence: int
    opened_at: float
    attempt: int
    owner: str | None
    producer: str | None
    admission_version: int | None
    publications: tuple[int, ...]
    oldest_version: int | None
    step: int | None
    drop_reason: str | None
    payload_bytes: int
    has_payload: bool
    outcome: GroupOutcome | None


class MoveView(Message, frozen=True, kw_only=True):
    at: float
    from_state: str | None
    to_state: str
    note: str
    by: str


class Life(Message, frozen=True, kw_only=True):
    """A group, what happened to it, and the same told in sentences."""

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
    violations: tuple[str, ...]


class Health(Message, frozen=True, kw_only=True):
    status: str
    runs: int
