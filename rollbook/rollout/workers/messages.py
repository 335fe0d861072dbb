"""Messages between the dispatcher and a worker process, encoded as MessagePack.

The dispatcher never unpickles anything, because the types of user code exist only in the worker.
"""

from typing import Self, TypeAlias

import msgspec

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.group import DropReason, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup, encode_group
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import EpisodeTimes, GroupResult
from rollbook.rollout.metrics import reported_scores


class Play(msgspec.Struct, tag="play", array_like=True, frozen=True):
    order: GroupOrder


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    group_id: str
    attempt: int
    is_late: bool = False
    """Its deadline has passed: report its stacks first."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    pid: int


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Heartbeat of the worker's event loop."""

    in_flight: int
    loop_lag_s: float
    continued: int = 0
    """Aborted policy requests that were continued from their partial tokens, since the worker started."""


class Stalled(msgspec.Struct, tag="stalled", array_like=True, frozen=True):
    """A group exceeded its deadline: its age and the stack of each episode."""

    group_id: str
    attempt: int
    age_s: float
    stack: str


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The worker failed. `stops_run`: replacing it would not help."""

    cause: str
    stops_run: bool


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True):
    """A played group, or a part of one. The dispatcher passes the frame on and never decodes it."""

    group_id: str
    attempt: int
    outcome: GroupOutcome
    group: EncodedGroup | None = None
    """None when no sample exists; then there is a drop reason."""
    drop: DropReason | None = None
    scores: tuple[dict[str, float], ...] = ()
    """What the reward functions reported, for each sample that they scored."""
    episodes: tuple[EpisodeTimes, ...] = ()
    is_last: bool = True
    """Nothing follows for this order."""
    missing: DropReason | None = None
    """In the last part: why samples of the group are missing."""
    baseline: tuple[float, ...] | None = None
    """The rewards of the quorum, in a part."""

    @classmethod
    def of(cls, order: GroupOrder, result: GroupResult) -> Self:
        return cls(
            group_id=order.group_id,
            attempt=order.attempt,
            outcome=result.outcome,
            group=None if result.group is None else encode_group(result.group),
            drop=result.drop,
            scores=() if result.group is None else reported_scores(result.group),
            episodes=result.episodes,
            is_last=result.is_last,
            missing=result.missing,
            baseline=None if result.group is None else result.group.baseline,
        )


ToWorker: TypeAlias = Play | Cancel | Stop
FromWorker: TypeAlias = Ready | Beat | Failed | Finished | Stalled

encode = msgspec.msgpack.Encoder().encode
to_worker = msgpack_decoder(ToWorker)
from_worker = msgpack_decoder(FromWorker)
