"""Conversion between records and rows: one table for each record, with its fields as columns."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from rollbook.contracts.admission import RunSettings
from rollbook.contracts.batch import AckReceipt, EndOfRun
from rollbook.contracts.group import GroupState
from rollbook.ledger.records import (
    GroupRecord,
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

R = TypeVar("R", bound=Record)


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
    ) -> None:
        self.columns = record.__struct_fields__
        self._record = record
        self._read = tuple((at, read[name]) for at, name in enumerate(self.columns) if read and name in read)
        self._write = tuple((at, write[name]) for at, name in enumerate(self.columns) if write and name in write)
        listed = ", ".join(self.columns)
        places = ", ".join("?" * len(self.columns))
        updates = ", ".join(f"{c} = excluded.{c}" for c in self.columns if c not in key)
        self.select = f"SELECT {listed} FROM {name} "
        self.insert = f"INSERT INTO {name} ({listed}) VALUES ({places})"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"

    def row(self, record: R) -> list[Any]:
        values = list(msgspec.structs.astuple(record))
        for at, convert in self._write:
            values[at] = convert(values[at])
        return values

    def record(self, row: Sequence[Any]) -> R:
        values = list(row)
        for at, convert in self._read:
            if values[at] is not None:
                values[at] = convert(values[at])
        return self._record(**dict(zip(self.columns, values, strict=True)))

    def all(self, rows: Iterable[Sequence[Any]]) -> list[R]:
        return [self.record(row) for row in rows]

    def one(self, row: Sequence[Any] | None) -> R | None:
        return None if row is None else self.record(row)


@lru_cache(maxsize=1024)
def _settings_of(text: str) -> RunSettings:
    return msgspec.json.decode(text, type=RunSettings)


@lru_cache(maxsize=1024)
def _text_of(settings: RunSettings) -> str:
    return msgspec.json.encode(settings).decode()


RUNS = Table(
    "runs",
    RunRecord,
    key=("run_id",),
    read={
        "settings": _settings_of,
        "ended": EndOfRun,
        "exhausted": bool,
        "is_last_short": bool,
    },
    write={"settings": _text_of},
)
OWNERS = Table("owners", OwnerRecord, key=("run_id", "owner_id"), read={"state": OwnerState})
PRODUCERS = Table("producers", ProducerRecord, key=("run_id", "name"))
GROUPS = Table(
    "groups",
    GroupRecord,
    key=("run_id", "group_id"),
    read={
        "origin": Origin,
        "state": GroupState,
        "publications": lambda text: tuple(map(int, text.split(","))) if text else (),
        "has_payload": bool,
    },
    # Plain values: for any other type, even a subclass, the driver searches for an adapter.
    write={
        "publications": lambda ids: ",".join(map(str, ids)),
        "origin": attrgetter("_value_"),
        "state": attrgetter("_value_"),
        "has_payload": int,
    },
)
MOVES = Table(
    "history",
    MoveRecord,
    key=("id",),
    read={"from_state": GroupState, "to_state": GroupState},
    write={"from_state": lambda state: None if state is None else state._value_, "to_state": attrgetter("_value_")},
)
STEPS = Table("steps", StepRecord, key=("run_id", "step", "epoch"), read={"receipt": AckReceipt})
PUBLICATIONS = Table("publications", PublicationRecord, key=("run_id", "id"))
