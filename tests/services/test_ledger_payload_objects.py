"""Payloads of a PostgreSQL ledger in a directory or a bucket: stored before their rows, checked when read, deleted after them."""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from rollbook.access import object_store
from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.batch import EncodedBatch
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.ledger.config import LedgerConfig, RunLedgerConfig
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.objects import objects_at
from rollbook.ledger.stores.postgres import store as postgres_store
from rollbook.ledger.stores.postgres.connection import connect
from rollbook.ledger.stores.registry import open_reader, open_store, reclaim, sqlite_url
from rollbook.ledger.tools.audit import audit
from rollbook.telemetry.events import EventLog
from tests.parts.bucket import bucket_of_ministack
from tests.parts.ledger.groups import RUN, group_of, settings, submission_of
from tests.parts.ledger.postgres import shared_server
from tests.parts.ledger.service import read_batch

LOG = EventLog("test", echo=sys.stdout)


@pytest.fixture
def url() -> str:
    return shared_server().fresh_url()


@pytest.fixture(params=["directory", "bucket"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    objects_at.cache_clear()
    if request.param == "directory":
        yield str(tmp_path)
    else:
        with bucket_of_ministack("payloads"):
            yield "s3://payloads/ledger/"
    objects_at.cache_clear()


@asynccontextmanager
async def ledger_at(url: str, payloads: str | None) -> AsyncIterator[Ledger]:
    async with (
        open_store(url, payloads=payloads) as store,
        open_ledger(store, LedgerConfig(), clock=SystemClock(), log=LOG) as ledger,
    ):
        yield ledger


async def start(ledger: Ledger) -> int:
    await ledger.create_run(RUN, settings(per_step=2, in_flight=4))
    role = await ledger.take_role(RUN, restored_step=0)
    await ledger.confirm(RUN, await ledger.register(RUN, 0, "w0", epoch=role.epoch), epoch=role.epoch)
    return role.epoch


async def submit(ledger: Ledger, *names: str) -> None:
    for name in names:
        await ledger.submit(RUN, submission_of(group_of(name, (-1,))))


def stored(location: str) -> list[str]:
    return sorted(objects_at(location).names(older_than_s=-60))


def violations(url: str) -> tuple[str, ...]:
    with open_reader(url) as reader:
        return tuple(audit(reader, RUN).violations)


async def test_batches_are_read_from_objects_and_the_audit_finds_each_damaged_or_missing_one(
    url: str, location: str
) -> None:
    async with ledger_at(url, location) as ledger:
        epoch = await start(ledger)
        await submit(ledger, "a", "b")
    with psycopg.connect(url) as db:
        assert db.execute("SELECT count(*) FROM payloads").fetchone() == (0,)
        rows = db.execute("SELECT group_id, name FROM payload_objects ORDER BY group_id").fetchall()
    assert stored(location) == sorted(name for _, name in rows)
    # A payload stays where it was stored: this replica keeps new ones in the database.
    async with ledger_at(url, None) as other:
        await submit(other, "c")
        batch = await read_batch(other, 1, epoch=epoch, wait_s=10)
        assert isinstance(batch, EncodedBatch)
        assert [group.id for group in batch.decode().groups] == ["a@0", "b@0"]
    assert violations(url) == ()
    objects = objects_at(location)
    names: dict[str, str] = dict(rows)
    body = bytearray(objects.get(names["a@0"]) or b"")
    body[len(body) // 2] ^= 1
    objects.put(names["a@0"], bytes(body))
    objects.delete([names["b@0"]])
    found = violations(url)
    assert len(found) == 2
    assert any("a@0" in line and names["a@0"] in line and "does not match its digest" in line for line in found), found
    assert any("b@0" in line and names["b@0"] in line and "is missing" in line for line in found), found
    async with ledger_at(url, location) as ledger:
        with pytest.raises(StoreFaultError, match="does not match its digest"):
            await read_batch(ledger, 1, epoch=epoch, wait_s=10)


async def test_objects_are_deleted_after_their_rows_and_the_rest_of_failed_commits_is_reclaimed(
    url: str, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(url, payloads=location) as store:
        for name in ("a", "b"):
            await store.write(lambda tx, name=name: tx.payloads.put(RUN, GroupId(name), name.encode() * 9))  # type: ignore[misc]
        await store.write(lambda tx: tx.payloads.delete(RUN, GroupId("a")))
        assert len(stored(location)) == 2, "a reader may have read the row before it was deleted"
        db = connect(url)
        postgres_store.sweep(db)
        assert len(stored(location)) == 2
        postgres_store.sweep(db, kept_s=0)
        db.close()
        (kept,) = stored(location)
        objects_at(location).put("run-1/00/left", b"left by a commit that failed")
    reclaim(url)
    assert stored(location) == sorted([kept, "run-1/00/left"]), "it may belong to a commit that is not complete yet"
    monkeypatch.setattr(postgres_store, "UNUSED_S", -60.0)
    reclaim(url)
    assert stored(location) == [kept]
    async with open_store(url) as store:
        assert await store.read(lambda tx: tx.payloads.get(RUN, GroupId("b"))) == b"b" * 9


async def test_a_commit_whose_objects_cannot_be_stored_fails_as_a_whole_and_can_be_repeated(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "CONNECT_S", 1)
    objects_at.cache_clear()
    with bucket_of_ministack("payloads") as server:
        async with ledger_at(url, "s3://payloads") as ledger:
            await start(ledger)
            server.kill()
            server.wait()
            with pytest.raises(TransientError, match="s3://payloads cannot be reached"):
                await submit(ledger, "a")
            assert (await ledger.status(RUN)).queued_bytes == 0
        async with ledger_at(url, None) as ledger:
            await submit(ledger, "a")
            assert (await ledger.status(RUN)).queued_bytes > 0
    objects_at.cache_clear()
    assert violations(url) == ()


async def test_a_location_that_cannot_be_used_is_refused_before_anything_is_written(
    url: str, location: str, tmp_path: Path
) -> None:
    absent = str(tmp_path / "absent") if location.startswith("/") else "s3://absent/a"
    with pytest.raises(StoreFaultError, match="absent"):
        async with open_store(url, payloads=absent):
            pass


def test_payloads_outside_the_store_need_postgresql(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"ledger\.payloads needs a PostgreSQL store"):
        open_store(sqlite_url(tmp_path), payloads=str(tmp_path))
    with pytest.raises(ValueError, match="payloads needs a PostgreSQL store"):
        RunLedgerConfig(payloads="/shared/payloads")
    with pytest.raises(ValueError, match="payloads"):
        RunLedgerConfig.model_validate({"payloads": "relative", "store": "postgresql://a/b"})
