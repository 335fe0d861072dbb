"""The primitives of the Atropos dialect as SQL."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord, Shelf, ShelvedGroup, UnansweredPost
from rollbook.ledger.stores.sql.tables import Table

RECORDS = Table("atropos_runs", AtroposRecord, key=("run_id",), read={"is_started": bool}, write={"is_started": int})
ENVS = Table(
    "atropos_envs", EnvRecord, key=("run_id", "env_id"), read={"is_connected": bool}, write={"is_connected": int}
)
GROUPS = Table(
    "atropos_groups", ShelvedGroup, key=("run_id", "group_id"), read={"is_buffered": bool}, write={"is_buffered": int}
)
UNANSWERED = Table("atropos_unanswered", UnansweredPost, key=("run_id", "digest"))
EMPTIED = ("atropos_envs", "atropos_groups", "atropos_shelves", "atropos_unanswered")


class Rows(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """What is needed of a database driver here. `sql_transaction` asks for a little more."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Rows: ...


class SqlAtroposTables:
    """Satisfies `atropos.records.AtroposTables` on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection

    def record(self, run_id: RunId) -> AtroposRecord | None:
        return RECORDS.one(self._db.execute(RECORDS.select + "WHERE run_id = ?", (run_id,)).fetchone())

    def put_record(self, record: AtroposRecord) -> None:
        self._db.execute(RECORDS.upsert, RECORDS.row(record))

    def envs(self, run_id: RunId) -> list[EnvRecord]:
        return ENVS.all(self._db.execute(ENVS.select + "WHERE run_id = ? ORDER BY env_id", (run_id,)))

    def env(self, run_id: RunId, env_id: int) -> EnvRecord | None:
        found = self._db.execute(ENVS.select + "WHERE run_id = ? AND env_id = ?", (run_id, env_id))
        return ENVS.one(found.fetchone())

    def put_env(self, env: EnvRecord) -> None:
        self._db.execute(ENVS.upsert, ENVS.row(env))

    def clear(self, run_id: RunId) -> None:
        for table in EMPTIED:
            self._db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))

    def put_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        self._db.executemany(GROUPS.upsert, [GROUPS.row(group) for group in groups])
        shelves = Counter((group.run_id, group.env_id, group.size) for group in groups if not group.is_buffered)
        for shelf, num in shelves.items():
            self._count(*shelf, num)

    def shelved(self, run_id: RunId, group_id: GroupId) -> ShelvedGroup | None:
        found = self._db.execute(GROUPS.select + "WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        return GROUPS.one(found.fetchone())

    def take_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        self._db.executemany(
            "DELETE FROM atropos_groups WHERE run_id = ? AND group_id = ?", [(g.run_id, g.group_id) for g in groups]
        )
        for run_id, env_id, size in {(g.run_id, g.env_id, g.size) for g in groups if not g.is_buffered}:
            gone = sum((g.env_id, g.size) == (env_id, size) for g in groups if not g.is_buffered)
            self._count(run_id, env_id, size, -gone)

    def shelves(self, run_id: RunId) -> list[Shelf]:
        rows = self._db.execute(
            "SELECT env_id, size, num FROM atropos_shelves WHERE run_id = ? ORDER BY env_id, size", (run_id,)
        )
        return [Shelf(env_id=env_id, size=size, num=num) for env_id, size, num in rows if num]

    def on_shelf(self, run_id: RunId, env_id: int, size: int, limit: int) -> list[ShelvedGroup]:
        where = "WHERE run_id = ? AND is_buffered = 0 AND env_id = ? AND size = ? ORDER BY place LIMIT ?"
        return GROUPS.all(self._db.execute(GROUPS.select + where, (run_id, env_id, size, limit)))

    def buffered(self, run_id: RunId, env_id: int) -> list[ShelvedGroup]:
        where = "WHERE run_id = ? AND is_buffered = 1 AND env_id = ? ORDER BY place"
        return GROUPS.all(self._db.execute(GROUPS.select + where, (run_id, env_id)))

    def unanswered(self, run_id: RunId, digest: str) -> UnansweredPost | None:
        found = self._db.execute(UNANSWERED.select + "WHERE run_id = ? AND digest = ?", (run_id, digest))
        return UNANSWERED.one(found.fetchone())

    def put_unanswered(self, posts: Sequence[UnansweredPost]) -> None:
        self._db.executemany(UNANSWERED.upsert, [UNANSWERED.row(post) for post in posts])

    def forget_unanswered(self, run_id: RunId, digests: Sequence[str]) -> None:
        keys = [(run_id, digest) for digest in digests]
        self._db.executemany("DELETE FROM atropos_unanswered WHERE run_id = ? AND digest = ?", keys)

    def forget_answered(self, run_id: RunId, digests: Sequence[str]) -> None:
        if len(set(digests)) == len(digests):
            # Nearly all came once: their rows go, and only the others are counted down.
            keys = [(run_id, digest) for digest in digests]
            gone = self._db.executemany(
                "DELETE FROM atropos_unanswered WHERE run_id = ? AND digest = ? AND num <= 1", keys
            )
            if gone.rowcount == len(keys):
                return
            self._db.executemany("UPDATE atropos_unanswered SET num = num - 1 WHERE run_id = ? AND digest = ?", keys)
            return
        for digest in digests:
            self.forget_answered(run_id, [digest])

    def forget_unanswered_before(self, run_id: RunId, at: float) -> None:
        self._db.execute("DELETE FROM atropos_unanswered WHERE run_id = ? AND at < ?", (run_id, at))

    def _count(self, run_id: RunId, env_id: int, size: int, by: int) -> None:
        self._db.execute(
            "INSERT INTO atropos_shelves (run_id, env_id, size, num) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (run_id, env_id, size) DO UPDATE SET num = atropos_shelves.num + excluded.num",
            (run_id, env_id, size, by),
        )
