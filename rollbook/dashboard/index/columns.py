"""The groups of a run as arrays, one element per group, for filters, counts and histograms.

Groups are numbered as they are indexed. A million groups take about 60 MB, and a filter over all of them a few milliseconds.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import DropKind, GroupState
from rollbook.contracts.trajectory import EndReason
from rollbook.dashboard.source import GroupRow

STATES = ("", *(state.value for state in GroupState))
"""Code 0: a state that this release does not know."""
DROPS = ("", *(kind.value for kind in DropKind))
ORIGINS = ("", "drawn", "external")
ENDS = tuple(reason.value for reason in EndReason)
"""Bits of the column `ends`, in this order."""
UNKNOWN = -1

COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("id_hash", np.int64),
    ("sequence", np.int64),
    ("state", np.uint8),
    ("drop_kind", np.uint8),
    ("origin", np.uint8),
    ("ends", np.uint8),
    ("task", np.int32),
    ("producer", np.int16),
    ("samples", np.int32),
    ("step", np.int32),
    ("lag", np.int32),
    ("reward", np.float32),
    ("solved", np.float32),
    ("tokens", np.float32),
    ("turns", np.float32),
    ("seconds", np.float32),
)
FACTS = np.dtype([(name, np.dtype(kind).newbyteorder("<")) for name, kind in COLUMNS])
"""The values of one group as bytes, in the file."""


def id_hash(group_id: str) -> int:
    """Finds a group without an index of ids: ids have no order, so inserting them into an index costs more than the groups."""
    return int(xxhash.xxh3_64_intdigest(group_id.encode()) >> 1)


class Numbering:
    """Interns strings as integer codes, in the order of their first use."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = list(texts)
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def number(self, text: str) -> int:
        """The code of a string. A new string gets the next one."""
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found

    def find(self, text: str) -> int:
        """-2 for an unknown string: no group has it, and -1 means that a group has none."""
        return self._numbers.get(text, -2)


class GroupColumns:
    def __init__(self) -> None:
        self.size = 0
        self._arrays: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype=kind) for name, kind in COLUMNS}

    def __getattr__(self, name: str) -> NDArray[Any]:
        try:
            return self._arrays[name][: self.size]
        except KeyError:
            raise AttributeError(name) from None

    def put(self, places: Sequence[int], facts: NDArray[Any]) -> None:
        """Set the groups at these places to these facts."""
        if not len(places):
            return
        at = np.asarray(places, dtype=np.int64)
        self._reserve(int(at.max()) + 1)
        for name, _ in COLUMNS:
            self._arrays[name][at] = facts[name]

    def _reserve(self, size: int) -> None:
        capacity = len(self._arrays["state"])
        if size > capacity:
            grown = max(size, 1024, capacity + capacity // 2)
            for name, kind in COLUMNS:
                array = np.zeros(grown, dtype=kind)
                array[: self.size] = self._arrays[name][: self.size]
                self._arrays[name] = array
        self.size = max(self.size, size)


class _End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a `SampleOutcome`."""

    reward: float | None
    solved: bool | None
    tokens: int
    turns: int
    end: str


class _Outcome(msgspec.Struct, frozen=True, gc=False):
    """The part of a `GroupOutcome` that is indexed. NaN: not known."""

    num_samples: int = 0
    reward_mean: float | None = None
    solved_rate: float | None = None
    mean_response_tokens: float = math.nan
    mean_turns: float = math.nan
    seconds: float = math.nan
    truncated_rate: float = 0.0
    samples: msgspec.Raw = msgspec.Raw(b"[]")

    def ends(self) -> int:
        """How its samples ended, as bits. Samples are decoded only if they did not all end in the same way."""
        if len(self.samples) <= len(b"[]"):
            return 0
        if self.truncated_rate == 0:
            return _END_BITS[EndReason.DONE]
        bits = 0
        for sample in _ENDS_DECODER.decode(self.samples):
            bits |= _END_BITS.get(sample.end, 0)
        return bits


def row_values(row: GroupRow, *, task: int, producer: int) -> tuple[Any, ...]:
    """The values of a group in the order of `COLUMNS`. A value that this release does not know has the code 0."""
    outcome = _NO_OUTCOME if row.outcome_json is None else _DECODER.decode(row.outcome_json)
    lag = row.lag
    # All samples ended by themselves: the common case, without a call.
    is_plain = outcome.truncated_rate == 0 and len(outcome.samples) > 2
    return (
        id_hash(row.group_id),
        row.sequence,
        _STATE_CODES.get(row.state, 0),
        0 if row.drop_reason is None else _DROP_CODES.get(row.drop_kind or "", 0),
        _ORIGIN_CODES.get(row.origin, 0),
        _DONE if is_plain else outcome.ends(),
        task,
        producer,
        outcome.num_samples,
        UNKNOWN if row.step is None else row.step,
        UNKNOWN if lag is None else lag,
        _NAN if outcome.reward_mean is None else outcome.reward_mean,
        _NAN if outcome.solved_rate is None else outcome.solved_rate,
        outcome.mean_response_tokens,
        outcome.mean_turns,
        outcome.seconds,
    )


_NAN = math.nan
_NO_OUTCOME = _Outcome()
_DECODER = json_decoder(_Outcome)
_ENDS_DECODER = json_decoder(tuple[_End, ...])
_STATE_CODES = {state: code for code, state in enumerate(STATES)}
_DROP_CODES = {kind: code for code, kind in enumerate(DROPS)}
_ORIGIN_CODES = {origin: code for code, origin in enumerate(ORIGINS)}
_DONE = 1 << ENDS.index(EndReason.DONE)
_END_BITS: dict[str, int] = {reason: 1 << bit for bit, reason in enumerate(ENDS)}
