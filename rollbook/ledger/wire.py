"""What crosses between the ledger's server and its clients: one struct a request, MessagePack bodies.

Words of `contracts` are sent as they are; a group travels as the opaque frame of `group_frame`, with everything that the ledger has
to know of it beside it.
"""

import msgspec

from rollbook.contracts.admission import RunSettings
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun
from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw

CONTENT_TYPE = "application/msgpack"
FRAME_HEADER_BYTES = 8
"""Payloads are streamed one after the other, each behind its length as a big-endian integer of this size."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of all. Unknown fields are refused: a misspelt one must not be ignored."""


class ErrorReply(Message, frozen=True, kw_only=True):
    kind: str
    message: str


class CreateRun(Message, frozen=True, kw_only=True):
    settings: RunSettings


class Join(Message, frozen=True, kw_only=True):
    owner_name: str
    nonce: str
    """The same in every repeat of one request."""


class Joined(Message, frozen=True, kw_only=True):
    owner: str


class Open(Message, frozen=True, kw_only=True):
    owner: str
    draws: tuple[Draw, ...]
    limit: int
    wait_s: float
    request_id: str
    """The same in every repeat of one request."""


class Heartbeat(Message, frozen=True, kw_only=True):
    owner: str


class Submit(Message, frozen=True, kw_only=True):
    group_id: str
    task_id: str
    draw: int
    attempt: int
    publications: tuple[int, ...]
    outcome: GroupOutcome
    drop: str | None
    payload: bytes
    payload_digest: str


class Close(Message, frozen=True, kw_only=True):
    group_id: str
    reason: str
    outcome: GroupOutcome | None


class Receipted(Message, frozen=True, kw_only=True):
    receipt: str


class Release(Message, frozen=True, kw_only=True):
    group_id: str
    attempt: int
    cause: str


class TakeRole(Message, frozen=True, kw_only=True):
    restored_step: int


class Batch(Message, frozen=True, kw_only=True):
    step: int
    epoch: int
    wait_s: float


class BatchReply(Message, frozen=True, kw_only=True):
    """Both None: not enough groups yet."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None


class Payloads(Message, frozen=True, kw_only=True):
    step: int
    epoch: int


class Acknowledge(Message, frozen=True, kw_only=True):
    step: int
    epoch: int
    weights_digest: str


class Acknowledged(Message, frozen=True, kw_only=True):
    receipt: AckReceipt


class Register(Message, frozen=True, kw_only=True):
    step: int
    epoch: int
    weights_digest: str


class Confirm(Message, frozen=True, kw_only=True):
    publication: Publication
    epoch: int


class Checkpointed(Message, frozen=True, kw_only=True):
    step: int
    epoch: int
    oldest_kept: int


class Finish(Message, frozen=True, kw_only=True):
    reason: EndOfRun
    epoch: int


class Empty(Message, frozen=True, kw_only=True):
    """Nothing to say: the verb is all."""
