"""Messages between a worker and its reward processes, encoded as msgpack."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.trajectory import EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCase:
    """The argument of a reward function: the task and the finished episode. Plain values, because it is sent to a process."""

    row: Mapping[str, Any]
    """The task's row."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation, if the rollout function recorded it."""
    response: str = ""
    """The last text of the policy."""
    finish_reason: EndReason = EndReason.DONE
    reward: float | None = None
    """The environment's reward."""
    solved: bool | None = None
    num_sampled: int = 0
    """Number of tokens that the policy sampled."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    num_turns: int = 0
    """Turns that the policy played. A function may return a list with one number for each."""
    turn_rewards: tuple[float, ...] | None = None
    """The environment's reward of each turn."""
    score: float | None = None
    """Only in a group: the value that the function gave this sample before, if it is of the quorum and a late sample is scored."""


class Load(msgspec.Struct, tag="load", array_like=True, frozen=True):
    functions: dict[str, str]
    """Name to dotted path."""
    search_path: list[str]


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    number: int
    function: str
    cases: tuple[RewardCase, ...]
    """One; several for a function of groups."""
    is_group: bool = False


class CancelCall(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """Cancel a call of an async function that exceeded its timeout."""

    number: int


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    is_async: dict[str, bool]


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True, frozen=True):
    cause: str


class CallResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    number: int
    value: float | None
    cause: str | None
    seconds: float
    turns: tuple[float, ...] | None = None
    values: tuple[float | None, ...] | None = None
    """Of a function of groups: one for each case."""


ToChild: TypeAlias = Load | Call | CancelCall
FromChild: TypeAlias = Loaded | LoadFailed | CallResult

encode = msgspec.msgpack.Encoder().encode
to_child = msgpack_decoder(ToChild)
from_child = msgpack_decoder(FromChild)
