"""The filter of a list of groups, as it is written in the address of the page, and what it selects."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import UsageError
from rollbook.dashboard.index.columns import DROPS, ENDS, ORIGINS, STATES, GroupColumns, Numbering

MAX_TEXT = 500
MAX_STEP = 2**31 - 1
SOLVED = ("all", "some", "none", "unknown")


class FilterSyntaxError(UsageError):
    """A filter cannot be read."""


class Order(StrEnum):
    NEWEST = "newest"
    OLDEST = "oldest"
    REWARD = "reward"
    REWARD_DOWN = "-reward"
    TOKENS = "tokens"
    TOKENS_DOWN = "-tokens"
    SECONDS = "seconds"
    SECONDS_DOWN = "-seconds"

    @property
    def column(self) -> str | None:
        """None: in the order of the index."""
        return None if self in (Order.NEWEST, Order.OLDEST) else self.value.removeprefix("-")

    @property
    def is_descending(self) -> bool:
        return self is Order.NEWEST or self.value.startswith("-")


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends are included."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """All conditions must hold. None and empty: no condition."""

    state: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    step: Range | None = None
    task: str | None = None
    task_like: str | None = None
    tier: str | None = None
    reward: Range | None = None
    solved: str | None = None
    tokens: Range | None = None
    turns: Range | None = None
    seconds: Range | None = None
    lag: Range | None = None
    end: str | None = None
    origin: str | None = None
    producer: str | None = None
    text: str | None = None
    """Searched in the messages, after all other conditions."""
    order: Order = Order.NEWEST

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "GroupFilter":
        """From the parameters of a request; others are ignored. Raises `FilterSyntaxError`."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            value = query.get(field.name, "")
            if value:
                if len(value) > MAX_TEXT:
                    raise FilterSyntaxError(f"{field.name}: the value has more than {MAX_TEXT} characters")
                found[field.name] = _PARSERS[field.name](field.name, value)
        return cls(**found)


def _choices(known: Iterable[str]) -> Callable[[str, str], tuple[str, ...]]:
    allowed = [name for name in known if name]

    def parse(name: str, value: str) -> tuple[str, ...]:
        return tuple(sorted({_one_of(name, part, allowed) for part in value.split(",")}))

    return parse


def _choice(known: Iterable[str]) -> Callable[[str, str], str]:
    allowed = [name for name in known if name]
    return lambda name, value: _one_of(name, value, allowed)


def _one_of(name: str, value: str, allowed: list[str]) -> str:
    if value not in allowed:
        raise FilterSyntaxError(f"{name}={value}: choose one of {', '.join(allowed)}")
    return value


def _range(name: str, value: str) -> Range:
    """`low:high`; either may be empty."""
    low, colon, high = value.partition(":")
    try:
        found = Range(float(low or "-inf"), float(high or "inf")) if colon else Range(float(value), float(value))
    except ValueError:
        raise FilterSyntaxError(f"{name}={value}: write LOW:HIGH with two numbers; either may be left out") from None
    if math.isnan(found.low) or math.isnan(found.high):
        raise FilterSyntaxError(f"{name}={value}: NaN is not a number")
    return found


def _steps(name: str, value: str) -> Range:
    """`12` or `10-20`."""
    low, dash, high = value.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or len(value) > 21:
        raise FilterSyntaxError(f"{name}={value}: write one step, or FIRST-LAST")
    return Range(min(int(low), MAX_STEP), min(int(high if dash else low), MAX_STEP))


def _text(name: str, value: str) -> str:
    return value


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "state": _choices(STATES),
    "drop": _choices(DROPS),
    "step": _steps,
    "task": _text,
    "task_like": _text,
    "tier": _text,
    "reward": _range,
    "solved": _choice(SOLVED),
    "tokens": _range,
    "turns": _range,
    "seconds": _range,
    "lag": _range,
    "end": _choice(ENDS),
    "origin": _choice(ORIGINS),
    "producer": _text,
    "text": _text,
    "order": lambda name, value: Order(_one_of(name, value, list(Order))),
}


def masks_of(
    wanted: GroupFilter,
    columns: GroupColumns,
    *,
    tasks: Numbering,
    producers: Numbering,
    tier_of: Mapping[str, str] | None = None,
    solved: NDArray[np.uint8] | None = None,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which groups the filter selects, apart from its text, and which it would select without its condition on the reward.

    `solved`: the result of `solved_class`, if it is known.
    """
    mask = np.ones(columns.size, dtype=np.bool_)
    if wanted.state:
        mask &= np.isin(columns.state, [STATES.index(state) for state in wanted.state])
    if wanted.drop:
        mask &= np.isin(columns.drop_kind, [DROPS.index(kind) for kind in wanted.drop])
    if wanted.task is not None:
        mask &= columns.task == tasks.find(wanted.task)
    if wanted.task_like is not None:
        part = wanted.task_like.lower()
        mask &= np.array([part in text.lower() for text in tasks.texts], dtype=np.bool_)[columns.task]
    if wanted.tier is not None:
        tiers = tier_of or {}
        mask &= np.array([tiers.get(text) == wanted.tier for text in tasks.texts], dtype=np.bool_)[columns.task]
    if wanted.origin is not None:
        mask &= columns.origin == ORIGINS.index(wanted.origin)
    if wanted.producer is not None:
        mask &= columns.producer == producers.find(wanted.producer)
    if wanted.end is not None:
        mask &= (columns.ends & (1 << ENDS.index(wanted.end))) != 0
    if wanted.solved is not None:
        mask &= (solved_class(columns) if solved is None else solved) == SOLVED.index(wanted.solved)
    for name in ("step", "lag", "tokens", "turns", "seconds"):
        limits: Range | None = getattr(wanted, name)
        if limits is not None:
            values = getattr(columns, name)
            mask &= _within(values, limits)
            if name in ("step", "lag"):
                mask &= values >= 0
    return mask if wanted.reward is None else mask & _within(columns.reward, wanted.reward), mask


def _within(values: NDArray[Any], limits: Range) -> NDArray[np.bool_]:
    """NaN is outside of every range."""
    found: NDArray[np.bool_]
    if limits.low == -math.inf:
        found = values <= limits.high
    elif limits.high == math.inf:
        found = values >= limits.low
    else:
        found = (values >= limits.low) & (values <= limits.high)
    return found


def solved_class(columns: GroupColumns) -> NDArray[np.uint8]:
    """The position in `SOLVED` of each group."""
    solved = columns.solved
    found = np.full(len(solved), SOLVED.index("some"), dtype=np.uint8)
    found[solved >= 1] = SOLVED.index("all")
    found[solved <= 0] = SOLVED.index("none")
    found[np.isnan(solved)] = SOLVED.index("unknown")
    return found


def ordered(mask: NDArray[np.bool_], columns: GroupColumns, order: Order) -> NDArray[np.int64]:
    """The places of the selected groups, in this order. Groups without the value come last."""
    found = np.flatnonzero(mask)
    if order.column is None:
        return found[::-1] if order.is_descending else found
    values = getattr(columns, order.column)[found]
    return found[np.argsort(-values if order.is_descending else values, kind="stable")]
