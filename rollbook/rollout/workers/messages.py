"""Messages between the dispatcher and a worker process, encoded as msgpack.

Arrays travel as raw bytes. Nothing is unpickled on the dispatcher's side: user code lives in the worker, and so do its types.
"""

from typing import Any, Self, TypeAlias

import msgspec

from rollbook.contracts.group import DropReason, GroupId, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup, encode_group
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import TaskId
from rollbook.rollout.groups.player import GroupOrder, GroupResult
from rollbook.rollout.metrics import reported_scores


class Play(msgspec.Struct, tag="play", array_like=True, frozen=True):
    group_id: str
    attempt: int
    task_id: str
    draw: int
    row: dict[str, Any]
    min_publication: int
    deadline_s: float

    @classmethod
    def of(cls, order: GroupOrder) -> Self:
        return cls(
            group_id=order.group_id,
            attempt=order.attempt,
            task_id=order.task_id,
            draw=order.draw,
            row=dict(order.row),
            min_publication=order.min_publication,
            deadline_s=order.deadline_s,
        )

    def to_contract(self) -> GroupOrder:
        return GroupOrder(
            group_id=GroupId(self.group_id),
            attempt=self.attempt,
            task_id=TaskId(self.task_id),
            draw=self.draw,
            row=self.row,
            min_publication=PublicationId(self.min_publication),
            deadline_s=self.deadline_s,
        )


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    group_id: str
    attempt: int
    is_late: bool = False
    """Its time is over: say first where it hangs."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    pid: int


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A sign of life from the worker's event loop itself."""

    in_flight: int
    loop_lag_s: float
    continued: int = 0
    """Policy requests that were aborted and went on from their tokens, since the worker began."""


class Stalled(msgspec.Struct, tag="stalled", array_like=True, frozen=True):
    """A group was not finished in time: how old it is, and where each of its episodes waits."""

    group_id: str
    attempt: int
    age_s: float
    stack: str


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The worker cannot go on. `stops_run`: replacing it would not help."""

    cause: str
    stops_run: bool


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True):
    """A played group. The dispatcher passes the frame on and never decodes it."""

    group_id: str
    attempt: int
    outcome: GroupOutcome
    group: EncodedGroup | None = None
    """None when no sample exists; then there is a drop reason."""
    drop: DropReason | None = None
    scores: tuple[dict[str, float], ...] = ()
    """What the reward functions reported, for each sample that they scored."""

    @classmethod
    def of(cls, order: GroupOrder, result: GroupResult) -> Self:
        return cls(
            group_id=order.group_id,
            attempt=order.attempt,
            outcome=result.outcome,
            group=None if result.group is None else encode_group(result.group),
            drop=result.drop,
            scores=() if result.group is None else reported_scores(result.group),
        )


ToWorker: TypeAlias = Play | Cancel | Stop
FromWorker: TypeAlias = Ready | Beat | Failed | Finished | Stalled

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
