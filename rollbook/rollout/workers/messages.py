"""Messages between the dispatcher and a worker process, encoded as MessagePack.

The dispatcher never unpickles anything, because the types of user code exist only in the worker.
"""

from typing import TypeAlias

import msgspec

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart


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


class Waiting(msgspec.Struct, tag="waits", array_like=True, frozen=True):
    """The worker waits for something in vain; without a cause, it no longer does."""

    awaited: str
    cause: str


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The worker failed. `stops_run`: replacing it would not help."""

    cause: str
    stops_run: bool
    is_explained: bool = False
    """The cause is written for people; the worker's output adds nothing."""


ToWorker: TypeAlias = Play | Cancel | Stop
FromWorker: TypeAlias = Ready | Beat | Failed | PlayedPart | Stalled | Waiting

encode = msgspec.msgpack.Encoder().encode
to_worker = msgpack_decoder(ToWorker)
from_worker = msgpack_decoder(FromWorker)
