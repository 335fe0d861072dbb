"""What crosses the edge between a worker and the processes its reward functions run in. The frames are those of `wire.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from rollbook.contracts.trajectory import EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCase:
    """What a reward function is given: the task and what was made of it. Plain values, because it crosses a process edge."""

    row: Mapping[str, Any]
    """The task's row."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation, where the rollout function recorded it."""
    response: str = ""
    """What the policy said last."""
    finish_reason: EndReason = EndReason.DONE
    reward: float | None = None
    """What the episode itself brought."""
    solved: bool | None = None
    num_sampled: int = 0
    """Tokens that the policy sampled."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class Load(msgspec.Struct, tag="load", array_like=True, frozen=True):
    functions: dict[str, str]
    """Name to dotted path."""
    search_path: list[str]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    call: int
    function: str
    case: RewardCase


class Give(msgspec.Struct, tag="give", array_like=True, frozen=True):
    """Give up a call of an async function: its time is over."""

    call: int


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    is_async: dict[str, bool]


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True, frozen=True):
    cause: str


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    call: int
    value: float | None
    cause: str | None
    seconds: float


ToChild: TypeAlias = Load | Ask | Give
FromChild: TypeAlias = Loaded | LoadFailed | Answer

encode = msgspec.msgpack.Encoder().encode
to_child = msgspec.msgpack.Decoder(ToChild)
from_child = msgspec.msgpack.Decoder(FromChild)
