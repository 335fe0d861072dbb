"""Conversion between records and rows: one table for each record, with its fields as columns.

The rows of the ledger's own tables end with a checksum of their values. The audit finds rows that were damaged on the disk by it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

import msgspec
import xxhash

from rollbook.contracts.admission import ActionKind, MemberRole, RunId, RunSettings
from rollbook.contracts.batch import AckReceipt, EndOfRun, PassSplit
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.records import (
    ActionRecord,
    GroupRecord,
    MemberRecord,
    MemberState,
    MoveRecord,
    Origin,
    OwnerRecord,
    OwnerState,
    ProducerRecord,
    PublicationRecord,
    Record,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.store import StoreFaultError

R = TypeVar("R", bound=Record)

_encode = msgspec.msgpack.Encoder().encode


def checksum(values: Sequence[Any]) -> int:
    """64 bits of XXH3 as a signed number, which both databases can store."""
    unsigned = xxhash.xxh3_64_intdigest(_encode(values))
    return unsigned if unsigned < 1 << 63 else unsigned - (1 << 64)


class RowsStatement(Protocol):
    """A statement on rows of one table, with different keys."""

    def sql(self, num_rows: int = 1) -> str: ...


@dataclass(frozen=True, slots=True)
class Insert:
    """Satisfies `RowsStatement`."""

    into: str
    num_columns: int
    on_conflict: str = ""

    def sql(self, num_rows: int = 1) -> str:
        row = f"({', '.join('?' * self.num_columns)})"
        return f"INSERT INTO {self.into} VALUES {', '.join([row] * num_rows)}{self.on_conflict}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Satisfies `RowsStatement`."""

    table: str
    key: tuple[str, ...]

    def sql(self, num_rows: int = 1) -> str:
        row = f"({' AND '.join(f'{column} = ?' for column in self.key)})"
        return f"DELETE FROM {self.table} WHERE {' OR '.join([row] * num_rows)}"


class Table(Generic[R]):
    """One record type and its table. `read` and `write` convert single fields from and to stored values."""

    def __init__(
        self,
        name: str,
        record: type[R],
        *,
        key: tuple[str, ...],
        read: dict[str, Callable[[Any], Any]] | None = None,
        write: dict[str, Callable[[Any], Any]] | None = None,
        has_checksum: bool = True,
    ) -> None:
        self.name = name
        self.columns = record.__struct_fields__
        self._record = record
        self._key = key
        self._key_of = attrgetter(*key)
        self._has_checksum = has_checksum
        read, write = {**(read or {})}, {**(write or {})}
        for column, kind in get_type_hints(record).items():
            # Values are written with the types that they are read with, so that their checksum is the same.
            if kind is bool:
                read.setdefault(column, bool)
                write.setdefault(column, int)
            elif kind is float:
                write.setdefault(column, float)
            elif kind == float | None:
                write.setdefault(column, lambda value: None if value is None else float(value))
        self._read = tuple((at, read[name]) for at, name in enumerate(self.columns) if name in read)
        self._write = tuple((at, write[name]) for at, name in enumerate(self.columns) if name in write)
        stored = (*self.columns, "checksum") if has_checksum else self.columns
        updates = ", ".join(f"{c} = excluded.{c}" for c in stored if c not in key)
        self.select = f"SELECT {', '.join(self.columns)} FROM {name} "
        self.insert = Insert(f"{name} ({', '.join(stored)})", len(stored))
        self.upsert = replace(self.insert, on_conflict=f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}")
        self.with_key = "WHERE " + " AND ".join(f"{column} = ?" for column in key)
        self.delete = Delete(name, key)
        self.select_checked = f"SELECT {', '.join(stored)} FROM {name} "

    def key_of(self, record: R) -> tuple[Any, ...]:
        key = self._key_of(record)
        return key if len(self._key) > 1 else (key,)

    def row(self, record: R) -> list[Any]:
        values = list(msgspec.structs.astuple(record))
        for at, convert in self._write:
            values[at] = convert(values[at])
        if self._has_checksum:
            values.append(checksum(values))
        return values

    def record(self, row: Sequence[Any]) -> R:
        """Raises `StoreFaultError` for a row that is damaged so much that it has no meaning."""
        values = list(row)
        try:
            for at, convert in self._read:
                if values[at] is not None:
                    values[at] = convert(values[at])
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise StoreFaultError(f"{self._named(row)} is damaged: {error}") from error
        return self._record(**dict(zip(self.columns, values, strict=True)))

    def damaged(self, rows: Iterable[Sequence[Any]]) -> Iterator[str]:
        """A sentence for each row of `select_checked` whose checksum differs."""
        for row in rows:
            if checksum(row[:-1]) != row[-1]:
                yield f"{self._named(row)} was changed after it was written: its checksum does not match"

    def _named(self, row: Sequence[Any]) -> str:
        key = ", ".join(f"{name} {row[self.columns.index(name)]!r}" for name in self._key if name in self.columns)
        return f"the row of table {self.name} with {key or list(row)}"

    def all(self, rows: Iterable[Sequence[Any]]) -> list[R]:
        return [self.record(row) for row in rows]

    def one(self, row: Sequence[Any] | None) -> R | None:
        return None if row is None else self.record(row)


@lru_cache(maxsize=1024)
def _settings_of(text: str) -> RunSettings:
    return json_decoder(RunSettings).decode(text)


@lru_cache(maxsize=1024)
def _text_of(settings: RunSettings) -> str:
    return msgspec.json.encode(settings).decode()


# Every row has some of these few values: a cache takes a tenth of the time of the conversion.
_state_of = lru_cache(maxsize=64)(GroupState)
_origin_of = lru_cache(maxsize=64)(Origin)


@lru_cache(maxsize=1024)
def _ids_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _text_of_ids(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))


def _text_of_rewards(rewards: tuple[float, ...] | None) -> str | None:
    return None if rewards is None else msgspec.json.encode(rewards).decode()


RUNS = Table(
    "runs",
    RunRecord,
    key=("run_id",),
    read={"settings": _settings_of, "ended": EndOfRun},
    write={"settings": _text_of},
)
OWNERS = Table("owners", OwnerRecord, key=("run_id", "owner_id"), read={"state": OwnerState})
MEMBERS = Table(
    "members",
    MemberRecord,
    key=("run_id", "member_id"),
    read={"state": MemberState, "role": MemberRole},
    write={"state": attrgetter("_value_"), "role": attrgetter("_value_")},
)
ACTIONS = Table(
    "actions",
    ActionRecord,
    key=("run_id", "number"),
    read={"kind": ActionKind},
    write={"kind": attrgetter("_value_")},
)
PRODUCERS = Table("producers", ProducerRecord, key=("run_id", "name"))
GROUPS = Table(
    "groups",
    GroupRecord,
    key=("run_id", "group_id"),
    read={
        "origin": _origin_of,
        "state": _state_of,
        "publications": _ids_of,
        "baseline": lambda text: json_decoder(tuple[float, ...]).decode(text),
    },
    # Plain values: for any other type, even a subclass, the driver searches for an adapter.
    write={
        "publications": _text_of_ids,
        "baseline": _text_of_rewards,
        "origin": attrgetter("_value_"),
        "state": attrgetter("_value_"),
    },
)
MOVES = Table(
    "history",
    MoveRecord,
    key=("run_id", "group_id", "to_state"),
    read={"from_state": _state_of, "to_state": _state_of},
    write={"from_state": lambda state: None if state is None else state._value_, "to_state": attrgetter("_value_")},
)


class BatchRow(Record, frozen=True, kw_only=True):
    """A `BatchRecord` without its entries."""

    run_id: RunId
    step: int
    digest: str
    is_last: bool
    cut: int | None
    epoch: int
    decided_at: float


class EntryRow(Record, frozen=True, kw_only=True):
    run_id: RunId
    step: int
    place: int
    group_id: GroupId
    sequence: int
    payload_digest: str
    oldest_version: int | None
    masked: tuple[int, ...]


class PositionRow(Record, frozen=True, kw_only=True):
    run_id: RunId
    position: int
    unsettled: int


POSITIONS = Table("positions", PositionRow, key=("run_id", "position"), has_checksum=False)
BATCHES = Table("batches", BatchRow, key=("run_id", "step"))
ENTRIES = Table(
    "batch_entries",
    EntryRow,
    key=("run_id", "step", "place"),
    read={"masked": _ids_of},
    write={"masked": _text_of_ids},
)
STEPS = Table(
    "steps",
    StepRecord,
    key=("run_id", "step", "epoch"),
    read={"receipt": AckReceipt, "split": lambda text: json_decoder(PassSplit).decode(text)},
    write={"split": lambda split: None if split is None else msgspec.json.encode(split).decode()},
)
PUBLICATIONS = Table("publications", PublicationRecord, key=("run_id", "id"))
CHECKED: tuple[Table[Any], ...] = (
    RUNS,
    OWNERS,
    MEMBERS,
    ACTIONS,
    PRODUCERS,
    GROUPS,
    MOVES,
    BATCHES,
    ENTRIES,
    STEPS,
    PUBLICATIONS,
)
"""The tables whose rows have checksums. The others are recounted by the audit."""
