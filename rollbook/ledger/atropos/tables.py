"""The tables of the Atropos dialect, as side tables of the ledger's database, and their export and import."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos.records import AtroposRecord, Bucket, EnvRecord, QueuedGroup, UnconfirmedPost
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.sql.tables import Table

NAME = "atropos"
VERSION = 2
# Columns follow the fields of the records.
SCHEMA = (
    """CREATE TABLE atropos_runs (
        run_id        TEXT PRIMARY KEY,
        registration  TEXT,
        is_started    INTEGER NOT NULL,
        first_step    INTEGER NOT NULL,
        handed_step   INTEGER NOT NULL,
        served_step   INTEGER NOT NULL,
        shift         INTEGER NOT NULL,
        reset_below   INTEGER NOT NULL,
        latest        TEXT,
        server        TEXT,
        serving_until REAL NOT NULL
    )""",
    """CREATE TABLE atropos_envs (
        run_id               TEXT NOT NULL,
        env_id               INTEGER NOT NULL,
        desired_name         TEXT NOT NULL,
        real_name            TEXT NOT NULL,
        max_token_length     INTEGER NOT NULL,
        weight               REAL NOT NULL,
        group_size           INTEGER NOT NULL,
        min_batch_allocation REAL,
        is_connected         INTEGER NOT NULL,
        last_seen            REAL NOT NULL,
        PRIMARY KEY (run_id, env_id)
    )""",
    """CREATE TABLE atropos_queue (
        run_id      TEXT NOT NULL,
        group_id    TEXT NOT NULL,
        place       INTEGER NOT NULL,
        env_id      INTEGER NOT NULL,
        size        INTEGER NOT NULL,
        is_buffered INTEGER NOT NULL,
        PRIMARY KEY (run_id, group_id)
    )""",
    "CREATE INDEX atropos_queue_by_bucket ON atropos_queue (run_id, is_buffered, env_id, size, place)",
    """CREATE TABLE atropos_buckets (
        run_id TEXT NOT NULL,
        env_id INTEGER NOT NULL,
        size   INTEGER NOT NULL,
        num    INTEGER NOT NULL,
        PRIMARY KEY (run_id, env_id, size)
    )""",
    """CREATE TABLE atropos_unconfirmed (
        run_id TEXT NOT NULL,
        digest TEXT NOT NULL,
        num    INTEGER NOT NULL,
        at     REAL NOT NULL,
        answer TEXT NOT NULL,
        PRIMARY KEY (run_id, digest)
    )""",
)
RUNS = Table("atropos_runs", AtroposRecord, key=("run_id",), has_checksum=False)
ENVS = Table("atropos_envs", EnvRecord, key=("run_id", "env_id"), has_checksum=False)
QUEUE = Table("atropos_queue", QueuedGroup, key=("run_id", "group_id"), has_checksum=False)
UNCONFIRMED = Table("atropos_unconfirmed", UnconfirmedPost, key=("run_id", "digest"), has_checksum=False)


class AtroposTables:
    """Reads and writes inside one transaction. `put_*` inserts or replaces by key."""

    def __init__(self, tx: Transaction) -> None:
        self._db = tx.side_tables

    def exist(self) -> bool:
        return self._db.exists(NAME)

    def create(self) -> None:
        """Create the tables unless they exist."""
        self._db.create(NAME, VERSION, SCHEMA)

    def record(self, run_id: RunId) -> AtroposRecord:
        """The stored record, or a new one."""
        return self.stored_record(run_id) or AtroposRecord(run_id=run_id)

    def stored_record(self, run_id: RunId) -> AtroposRecord | None:
        return RUNS.one(self._db.select(RUNS.select + "WHERE run_id = ?", (run_id,)).fetchone())

    def put_record(self, record: AtroposRecord) -> None:
        self._db.write(RUNS.upsert.sql(), RUNS.row(record))

    def envs(self, run_id: RunId) -> list[EnvRecord]:
        """By id."""
        return ENVS.all(self._db.select(ENVS.select + "WHERE run_id = ? ORDER BY env_id", (run_id,)))

    def env(self, run_id: RunId, env_id: int) -> EnvRecord | None:
        found = self._db.select(ENVS.select + "WHERE run_id = ? AND env_id = ?", (run_id, env_id))
        return ENVS.one(found.fetchone())

    def put_env(self, env: EnvRecord) -> None:
        self._db.write(ENVS.upsert.sql(), ENVS.row(env))

    def clear(self, run_id: RunId) -> None:
        """Delete environments, queue and unconfirmed posts."""
        for table in ("atropos_envs", "atropos_queue", "atropos_buckets", "atropos_unconfirmed"):
            self._db.write(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))

    def put_queued(self, groups: Sequence[QueuedGroup]) -> None:
        """Write new groups. Those that are not buffered are counted in their buckets."""
        self._db.write_many(QUEUE.upsert.sql(), [QUEUE.row(group) for group in groups])
        self._count(groups, +1)

    def queued(self, run_id: RunId, group_id: GroupId) -> QueuedGroup | None:
        found = self._db.select(QUEUE.select + "WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        return QUEUE.one(found.fetchone())

    def all_queued(self, run_id: RunId) -> list[QueuedGroup]:
        return QUEUE.all(self._db.select(QUEUE.select + "WHERE run_id = ? ORDER BY place", (run_id,)))

    def remove_queued(self, groups: Sequence[QueuedGroup]) -> None:
        keys = [(group.run_id, group.group_id) for group in groups]
        self._db.write_many("DELETE FROM atropos_queue WHERE run_id = ? AND group_id = ?", keys)
        self._count(groups, -1)

    def buckets(self, run_id: RunId) -> list[Bucket]:
        rows = self._db.select(
            "SELECT env_id, size, num FROM atropos_buckets WHERE run_id = ? ORDER BY env_id, size", (run_id,)
        )
        return [Bucket(env_id=env_id, size=size, num=num) for env_id, size, num in rows if num]

    def in_bucket(self, run_id: RunId, env_id: int, size: int, limit: int) -> list[QueuedGroup]:
        """The first groups of one bucket, by place."""
        where = "WHERE run_id = ? AND is_buffered = 0 AND env_id = ? AND size = ? ORDER BY place LIMIT ?"
        return QUEUE.all(self._db.select(QUEUE.select + where, (run_id, env_id, size, limit)))

    def buffered(self, run_id: RunId, env_id: int) -> list[QueuedGroup]:
        """By place."""
        where = "WHERE run_id = ? AND is_buffered = 1 AND env_id = ? ORDER BY place"
        return QUEUE.all(self._db.select(QUEUE.select + where, (run_id, env_id)))

    def unconfirmed(self, run_id: RunId, digest: str) -> UnconfirmedPost | None:
        found = self._db.select(UNCONFIRMED.select + "WHERE run_id = ? AND digest = ?", (run_id, digest))
        return UNCONFIRMED.one(found.fetchone())

    def put_unconfirmed(self, posts: Sequence[UnconfirmedPost]) -> None:
        self._db.write_many(UNCONFIRMED.upsert.sql(), [UNCONFIRMED.row(post) for post in posts])

    def delete_unconfirmed(self, run_id: RunId, digests: Sequence[str]) -> None:
        keys = [(run_id, digest) for digest in digests]
        self._db.write_many("DELETE FROM atropos_unconfirmed WHERE run_id = ? AND digest = ?", keys)

    def delete_unconfirmed_before(self, run_id: RunId, at: float) -> None:
        self._db.write("DELETE FROM atropos_unconfirmed WHERE run_id = ? AND at < ?", (run_id, at))

    def delete_all_unconfirmed(self, run_id: RunId) -> None:
        self._db.write("DELETE FROM atropos_unconfirmed WHERE run_id = ?", (run_id,))

    def confirm(self, run_id: RunId, digests: Sequence[str]) -> None:
        """The response of one post of each digest was delivered."""
        if len(set(digests)) < len(digests):
            for digest in digests:
                self.confirm(run_id, [digest])
            return
        # Nearly all posts are sent once, so most rows are deleted; only the others are counted down.
        keys = [(run_id, digest) for digest in digests]
        sql = "DELETE FROM atropos_unconfirmed WHERE run_id = ? AND digest = ? AND num <= 1"
        if self._db.write_many(sql, keys) < len(keys):
            self._db.write_many("UPDATE atropos_unconfirmed SET num = num - 1 WHERE run_id = ? AND digest = ?", keys)

    def _count(self, groups: Sequence[QueuedGroup], sign: int) -> None:
        counts = Counter((group.run_id, group.env_id, group.size) for group in groups if not group.is_buffered)
        for (run_id, env_id, size), num in counts.items():
            self._db.write(
                "INSERT INTO atropos_buckets (run_id, env_id, size, num) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (run_id, env_id, size) DO UPDATE SET num = atropos_buckets.num + excluded.num",
                (run_id, env_id, size, sign * num),
            )


class _RunData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    record: AtroposRecord
    envs: list[EnvRecord]
    queued: list[QueuedGroup]


class AtroposExtension:
    """Implements `record_lines.RunExtension`."""

    name = NAME

    def export_run(self, tx: Transaction, run_id: RunId) -> bytes | None:
        tables = AtroposTables(tx)
        record = tables.stored_record(run_id) if tables.exist() else None
        if record is None:
            return None
        return msgspec.json.encode(_RunData(record, tables.envs(run_id), tables.all_queued(run_id)))

    def import_run(self, tx: Transaction, run_id: RunId, data: bytes) -> None:
        found = json_decoder(_RunData).decode(data)
        tables = AtroposTables(tx)
        tables.create()
        tables.put_record(found.record.changed(run_id=run_id))
        for env in found.envs:
            tables.put_env(env.changed(run_id=run_id))
        tables.put_queued([group.changed(run_id=run_id) for group in found.queued])
