"""The SQLite file of the view index, and the queries of the page on it.

The file holds what was derived from the ledger, so that a dashboard need not read the ledger again; the arrays in memory
(`columns.py`) answer filters and counts. An index belongs to one process at a time: a second dashboard of the same run uses a
temporary file. All methods are called from one thread.
"""

import fcntl
import math
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.decoding import json_decoder, msgpack_decoder
from rollbook.dashboard.index.columns import DROPS, ENDS, FACTS, STATES, GroupColumns, Numbering, id_hash, row_values
from rollbook.dashboard.index.filters import SOLVED, GroupFilter, masks_of, ordered, solved_class
from rollbook.dashboard.source import GroupRow

FORMAT = "3"
SCHEMA = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")
HISTOGRAM_BINS = 40
KINDS = (len(STATES), len(DROPS), len(SOLVED))
CACHED_LISTS = 8
"""Ordered lists that are kept until the index changes: moving through a filter needs the same one again and again."""
ADD = "INSERT INTO groups (place, group_id, facts, body) VALUES (?, ?, ?, ?)"
PUT = ADD.replace("INSERT", "INSERT OR REPLACE")
FIND = "SELECT group_id, place FROM groups WHERE place IN (SELECT value FROM json_each(?))"
LOAD = "SELECT place, facts FROM groups"
LOADED_ROWS = 50_000
PAGE_BYTES = 16_384
"""A row has about 800 bytes; pages of 4 KB would waste a part of each."""
CACHE_KB = 8_000
"""Groups are appended, and a page of the list reads a few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the ledger was read."""

    is_snapshot_complete: bool = False
    """Whether every group was read once. Changes are followed from then on."""
    next_sequence: int = 0
    """The first group that the snapshot has not read."""
    change: int = 0
    """The number of the last change that was read. Set when the snapshot begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codes:
    """Small numbers for each group, so that counting the groups of a filter is one pass over one array."""

    solved: NDArray[np.uint8]
    """Position in `SOLVED`."""
    kind: NDArray[np.uint16]
    """State, drop kind and solved class: an index into an array of the shape `KINDS`."""
    reward_bin: NDArray[np.uint8]
    """Bin of the histogram; `HISTOGRAM_BINS` without a reward."""
    edges: NDArray[np.float64]
    """Edges of the bins. Empty if no group has a reward."""
    rewards: NDArray[np.int64]
    """Groups in each bin."""

    @classmethod
    def of(cls, columns: GroupColumns) -> "_Codes":
        solved = solved_class(columns)
        kind = (columns.state.astype(np.uint16) * len(DROPS) + columns.drop_kind) * len(SOLVED) + solved
        rewards = columns.reward
        known = np.isfinite(rewards)
        bins, edges = np.full(columns.size, HISTOGRAM_BINS, dtype=np.uint8), np.zeros(0)
        if known.any():
            low, high = float(rewards[known].min()), float(rewards[known].max())
            if low == high:
                low, high = low - 0.5, high + 0.5
            edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
            width = (high - low) / HISTOGRAM_BINS
            bins[known] = np.minimum((rewards[known] - low) / width, HISTOGRAM_BINS - 1).astype(np.uint8)
        counts = np.bincount(bins, minlength=HISTOGRAM_BINS)[:HISTOGRAM_BINS]
        return cls(solved=solved, kind=kind, reward_bin=bins, edges=edges, rewards=counts)


class ViewIndex:
    """Opened by `open_index`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.columns = GroupColumns()
        self.tasks = Numbering(_texts(db, "SELECT task_id FROM tasks ORDER BY number"))
        self.producers = Numbering(_texts(db, "SELECT name FROM producers ORDER BY number"))
        self._stored = {"tasks": len(self.tasks.texts), "producers": len(self.producers.texts)}
        self.tier_of: Mapping[str, str] = {}
        """The tier of each task, if the run has tiers."""
        self.position = self._read_position()
        self._lists: dict[GroupFilter, NDArray[np.int64]] = {}
        self._masks: tuple[GroupFilter, NDArray[np.bool_], NDArray[np.bool_]] | None = None
        """Results of the last filter: a page needs them for the list, the histogram and the counts."""
        self._codes: _Codes | None = None
        cursor = db.execute(LOAD)
        while rows := cursor.fetchmany(LOADED_ROWS):
            self.columns.put([row[0] for row in rows], np.frombuffer(b"".join(row[1] for row in rows), FACTS))

        self._newest = int(self.columns.sequence.max(initial=-1))
        """The highest sequence number."""

    def set_tiers(self, tier_of: Mapping[str, str]) -> None:
        self.tier_of = tier_of
        self._forget_results()

    def _forget_results(self) -> None:
        """What was computed from the groups is out of date."""
        self._lists.clear()
        self._masks = self._codes = None

    @property
    def num_groups(self) -> int:
        return self.columns.size

    # ------------------------------------------------------------------ writing

    def put(self, rows: Sequence[GroupRow], position: Position) -> None:
        """Add or replace groups, and record how far the ledger was read, in one transaction."""
        values = [
            row_values(
                row,
                task=self.tasks.number(row.task_id),
                producer=-1 if row.producer is None else self.producers.number(row.producer),
            )
            for row in rows
        ]
        facts, places = np.array(values, dtype=FACTS), self._places(rows)
        packed = facts.tobytes()
        self._db.execute("BEGIN")
        try:
            stored = [
                (place, row.group_id, packed[at : at + FACTS.itemsize], _ENCODER.encode(row))
                for place, row, at in zip(places, rows, range(0, len(packed), FACTS.itemsize), strict=True)
            ]
            self._db.executemany(PUT, [one for one in stored if one[0] < self.columns.size])
            self._db.executemany(ADD, [one for one in stored if one[0] >= self.columns.size])
            self._store_texts("tasks", "task_id", self.tasks)
            self._store_texts("producers", "name", self.producers)
            self._db.execute(
                "INSERT OR REPLACE INTO meta VALUES ('position', ?)", (msgspec.json.encode(position).decode(),)
            )
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._stored = {"tasks": len(self.tasks.texts), "producers": len(self.producers.texts)}
        self.columns.put(places, facts)
        self._newest = max(self._newest, max((row.sequence for row in rows), default=-1))
        self.position = position
        if rows:
            self._forget_results()

    def clear(self) -> None:
        """Forget everything."""
        self._db.execute("BEGIN")
        for table in ("groups", "tasks", "producers"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("DELETE FROM meta WHERE name = 'position'")
        self._db.execute("COMMIT")
        self.columns, self.tasks, self.producers = GroupColumns(), Numbering(), Numbering()
        self._stored = {"tasks": 0, "producers": 0}
        self.position, self._newest = Position(), -1
        self._forget_results()

    def _places(self, rows: Sequence[GroupRow]) -> list[int]:
        """Where each group is stored. New groups are appended."""
        newest, after = self._newest, self.columns.size
        # Groups with higher numbers are certainly new, and those with lower numbers have been appended before.
        known = {}
        if old := [row for row in rows if row.sequence <= newest]:
            first = int(np.argmax(self.columns.sequence >= min(row.sequence for row in old)))
            known = self._find([row.group_id for row in old], first=first)
        for row in rows:
            if row.group_id not in known:
                known[row.group_id] = after
                after += 1
        return [known[row.group_id] for row in rows]

    def _find(self, ids: Sequence[str], *, first: int = 0) -> dict[str, int]:
        """The places of these groups, if they are indexed at or after the place `first`."""
        is_candidate = np.isin(self.columns.id_hash[first:], [id_hash(group_id) for group_id in ids])
        candidates = (first + np.flatnonzero(is_candidate)).tolist()
        wanted = frozenset(ids)
        found: Iterable[tuple[str, int]] = self._db.execute(FIND, (msgspec.json.encode(candidates).decode(),))
        return {group_id: place for group_id, place in found if group_id in wanted}

    def _store_texts(self, table: str, column: str, numbering: Numbering) -> None:
        first = self._stored[table]
        new = list(enumerate(numbering.texts[first:], start=first))
        if new:
            self._db.executemany(f"INSERT INTO {table} (number, {column}) VALUES (?, ?)", new)

    def _read_position(self) -> Position:
        row = self._db.execute("SELECT value FROM meta WHERE name = 'position'").fetchone()
        return Position() if row is None else json_decoder(Position).decode(row[0])

    # ------------------------------------------------------------------ queries

    def rows(self, places: Iterable[int]) -> list[GroupRow]:
        """The groups at these places, in this order."""
        found = (
            self._db.execute("SELECT body FROM groups WHERE place = ?", (int(place),)).fetchone() for place in places
        )
        return [_DECODER.decode(row[0]) for row in found if row is not None]

    def place_of(self, group_id: str) -> int | None:
        return self._find([group_id]).get(group_id)

    def list_of(self, wanted: GroupFilter) -> NDArray[np.int64]:
        """The places of the groups that the filter selects, in its order."""
        found = self._lists.pop(wanted, None)
        if found is None:
            found = ordered(self.mask(wanted), self.columns, wanted.order)
        self._lists[wanted] = found
        if len(self._lists) > CACHED_LISTS:
            del self._lists[next(iter(self._lists))]
        return found

    def list_after(self, wanted: GroupFilter, place: int) -> NDArray[np.int64]:
        """Those behind a place. Its group may have changed, so that the filter does not select it any more."""
        if place >= self.columns.size:
            return np.zeros(0, dtype=np.int64)
        places, mask = self.list_of(wanted), self.mask(wanted)
        if not mask[place]:
            mask = mask.copy()
            mask[place] = True
            places = ordered(mask, self.columns, wanted.order)
        return places[int(np.flatnonzero(places == place)[0]) + 1 :]

    def mask(self, wanted: GroupFilter) -> NDArray[np.bool_]:
        """Which groups the filter selects, apart from its text."""
        return self._masks_of(wanted)[0]

    def _masks_of(self, wanted: GroupFilter) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        if self._masks is None or self._masks[0] != wanted:
            found = masks_of(
                wanted,
                self.columns,
                tasks=self.tasks,
                producers=self.producers,
                tier_of=self.tier_of,
                solved=self.codes.solved,
            )
            self._masks = (wanted, *found)
        return self._masks[1:]

    @property
    def codes(self) -> "_Codes":
        if self._codes is None:
            self._codes = _Codes.of(self.columns)
        return self._codes

    def reward_histogram(self, wanted: GroupFilter) -> dict[str, list[float]]:
        """Mean rewards within the filter, apart from its condition on the reward, and of all groups, in the same bins."""
        codes = self.codes
        if not len(codes.edges):
            return {"edges": [], "counts": [], "all": []}
        _, without_reward = self._masks_of(wanted)
        counts = np.bincount(codes.reward_bin[without_reward], minlength=HISTOGRAM_BINS)[:HISTOGRAM_BINS]
        return {"edges": codes.edges.tolist(), "counts": counts.tolist(), "all": codes.rewards.tolist()}

    def facets(self, wanted: GroupFilter) -> dict[str, dict[str, int]]:
        """How many of the selected groups have each state, drop kind, solved class and end of a sample."""
        mask = self.mask(wanted)
        kinds = np.bincount(self.codes.kind[mask], minlength=math.prod(KINDS)).reshape(KINDS)
        ends = np.bincount(self.columns.ends[mask], minlength=256)
        return {
            "state": _named(STATES, kinds.sum(axis=(1, 2))),
            "drop": _named(DROPS, kinds.sum(axis=(0, 2))),
            "solved": _named(SOLVED, kinds.sum(axis=(0, 1))),
            "tier": self._tier_counts(mask),
            "end": _named(ENDS, [ends[np.arange(256) & (1 << bit) != 0].sum() for bit in range(len(ENDS))]),
        }

    def _tier_counts(self, mask: NDArray[np.bool_]) -> dict[str, int]:
        if not self.tier_of:
            return {}
        names = sorted(set(self.tier_of.values()))
        codes = {name: code for code, name in enumerate(["", *names])}
        by_task = np.array([codes[self.tier_of.get(task, "")] for task in self.tasks.texts], dtype=np.int64)
        return _named(["", *names], np.bincount(by_task[self.columns.task[mask]], minlength=len(names) + 1))

    def close(self) -> None:
        self._db.close()


@contextmanager
def open_index(path: Path, run: str) -> Iterator[ViewIndex]:
    """Open the index of a run, or create it. An index that is damaged, of another format or of another run is built again.

    If the file is in use by another dashboard, or cannot be written, a temporary one is used.
    """
    with tempfile.TemporaryDirectory(prefix="rollbook-index-") as temporary:
        lock = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_suffix(".lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            path = Path(temporary) / path.name
        index = _open(path, run)
        try:
            yield index
        finally:
            index.close()
            if lock is not None:
                lock.close()


def discard(path: Path) -> None:
    for name in (path.name, f"{path.name}-journal", f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


def _open(path: Path, run: str) -> ViewIndex:
    try:
        return ViewIndex(_connect(path, run))
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, OverflowError):
        discard(path)
        return ViewIndex(_connect(path, run))


def _connect(path: Path, run: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        # Groups are appended: a rollback journal has nothing to copy, and a write-ahead log would write them twice.
        db.execute("PRAGMA journal_mode = DELETE")
        # The file can be derived again, so a commit need not wait for the disk.
        db.execute("PRAGMA synchronous = OFF")
        db.execute(f"PRAGMA cache_size = -{CACHE_KB}")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
            db.executescript(SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", [("format", FORMAT), ("run", run)])
        known = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('format', 'run')"))
        if known != {"format": FORMAT, "run": run}:
            raise ValueError(f"the index is of {known}")
    except BaseException:
        db.close()
        raise
    return db


def _texts(db: sqlite3.Connection, sql: str) -> list[str]:
    return [str(row[0]) for row in db.execute(sql)]


def _named(names: Sequence[str], counts: Iterable[int]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, counts, strict=False) if name and count}


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgpack_decoder(GroupRow)
