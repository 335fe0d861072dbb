"""Deletes objects of payloads whose rows were deleted, and objects of commits that failed."""

import threading
from collections.abc import Callable
from contextlib import suppress

from rollbook.ledger.stores.objects import objects_at
from rollbook.ledger.stores.postgres.connection import PostgresConnection

SWEEP_S = 30.0
KEPT_S = 60
"""Seconds that an object stays after its row was deleted: a reader may have read the row before."""
UNUSED_S = 3600.0
"""After this time, an object without a row is the rest of a commit that failed."""
SWEPT_AT_ONCE = 1000
TAKE_DELETED = (
    "DELETE FROM deleted_objects WHERE (location, name) IN (SELECT location, name FROM deleted_objects "
    "WHERE at < now() - make_interval(secs => ?) LIMIT ? FOR UPDATE SKIP LOCKED) RETURNING location, name"
)


def sweep(db: PostgresConnection, *, kept_s: float = KEPT_S) -> None:
    """Delete the objects whose rows were deleted. If this fails, they are deleted later."""
    while True:
        db.execute("BEGIN")
        try:
            rows = db.execute(TAKE_DELETED, (float(kept_s), SWEPT_AT_ONCE)).fetchall()
            for location in {row[0] for row in rows}:
                objects_at(location).delete([name for at, name in rows if at == location])
        except BaseException:
            if not db.is_lost:
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        if len(rows) < SWEPT_AT_ONCE:
            return


def delete_unused(db: PostgresConnection) -> None:
    """Delete old objects that no row names, at every location that rows name."""
    sweep(db, kept_s=0)
    for (location,) in db.execute("SELECT DISTINCT location FROM payload_objects").fetchall():
        objects = objects_at(location)
        # Listed before the rows are read: an object of a row that is written meanwhile is not listed, or is young.
        listed = set(objects.names(older_than_s=UNUSED_S))
        db.execute("BEGIN")  # rows are fetched a few at a time, in a transaction
        used = {row[0] for row in db.stream("SELECT name FROM payload_objects WHERE location = ?", (location,))}
        db.execute("COMMIT")
        objects.delete(sorted(listed - used))


class ObjectSweeper:
    """Deletes objects whose rows were deleted, in its own thread."""

    def __init__(self, connected: Callable[[], PostgresConnection]) -> None:
        self._connected = connected
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(SWEEP_S):
            with suppress(Exception):  # the database or the bucket cannot be reached: the next sweep repeats it
                db = self._connected()
                try:
                    sweep(db)
                finally:
                    db.close()
