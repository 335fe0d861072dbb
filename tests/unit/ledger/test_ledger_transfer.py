"""Export, import and compaction of a run."""

import json
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord, QueuedGroup
from rollbook.ledger.atropos.tables import AtroposExtension, AtroposTables
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.records import RunRecord
from rollbook.ledger.service import open_ledger
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.registry import open_reader, open_store, reclaim, sqlite_url
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import open_memory_store
from rollbook.ledger.tools.audit import audit, audit_run
from rollbook.ledger.tools.compaction import compact
from rollbook.ledger.tools.export import export_jsonl, readable_samples
from rollbook.ledger.tools.import_run import import_jsonl
from rollbook.ledger.tools.parquet import export_parquet
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.postgres import shared_server
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite

OTHER = RunId("other")
EXTENSIONS = (AtroposExtension(),)
LOG = EventLog("ledger")


def write_a_bit_of_everything(driver: RunDriver) -> None:
    """Trained, durable, batched, queued, dropped, leased, waiting and external groups; and rows of the Atropos dialect."""
    driver.create(settings(per_step=2, in_flight=12, staleness_bound=6, policy=BatchPolicy.DROP, keep_payloads=True))
    driver.take_role()
    driver.publish(0)
    owner = driver.join("rollout")
    grants = driver.open(owner, draws(0, 10)).grants
    for grant in grants[:6]:
        driver.submit(grant.task_id)
    driver.close(grants[6].task_id, DropReason(DropKind.INVALID, "no sample could be scored"))
    driver.submit(grants[7].task_id, drop=DropReason(DropKind.FILTERED, "all the same"))
    driver.release(grants[8].task_id, 1)
    for step in (1, 2):
        driver.decide(step)
        driver.acknowledge(step)
    driver.checkpointed(1)
    driver.decide(3)
    driver.submit("strange ü", (-1,))

    def atropos(tx: Transaction) -> None:
        tables = AtroposTables(tx)
        tables.create()
        tables.put_record(AtroposRecord(run_id=RUN, registration="{}", is_started=True))
        for env_id in (0, 1):
            env = EnvRecord(
                run_id=RUN,
                env_id=env_id,
                desired_name="env",
                real_name=f"env_{env_id}",
                max_token_length=9,
                weight=0.1,
                group_size=2,
                min_batch_allocation=None,
                is_connected=True,
                last_seen=1.5,
            )
            tables.put_env(env)
        for at, (env_id, is_buffered) in enumerate([(0, False), (0, True), (-1, False), (1, False), (1, False)]):
            queued = QueuedGroup(
                run_id=RUN, group_id=GroupId(f"s{at}"), place=at, env_id=env_id, size=2, is_buffered=is_buffered
            )
            tables.put_queued([queued])

    driver.store.write_now(atropos)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    with closing(blocking_sqlite(directory / FILE_NAME)) as file:
        write_a_bit_of_everything(RunDriver(file))
    return directory


@pytest.fixture
def exported(source: Path, tmp_path: Path) -> Path:
    target = tmp_path / "run.jsonl"
    with open_reader(sqlite_url(source)) as reader:
        report = export_jsonl(reader, RUN, target, extensions=EXTENSIONS)
    assert (report.groups, report.bytes_written) == (11, target.stat().st_size)
    return target


async def test_an_imported_run_is_exported_again_byte_for_byte(exported: Path, tmp_path: Path) -> None:
    on_file, on_server = sqlite_url(tmp_path / "file"), shared_server().fresh_url()
    for number, url in enumerate((on_file, on_server)):
        async with open_store(url) as store:
            report = await import_jsonl(store, exported, extensions=EXTENSIONS)
        assert (report.run_id, report.groups, report.payloads, report.steps) == (RUN, 11, 7, 2)
        again = tmp_path / f"again{number}.jsonl"
        with open_reader(url) as reader:
            assert audit(reader, RUN).violations == ()
            export_jsonl(reader, RUN, again, extensions=EXTENSIONS)
        assert again.read_bytes() == exported.read_bytes()


async def test_an_imported_run_can_be_continued(exported: Path) -> None:
    async with open_memory_store() as store:
        await import_jsonl(store, exported, as_run=OTHER, extensions=EXTENSIONS)
        assert await store.read(lambda tx: tx.runs.ids()) == [OTHER]
        assert await store.read(lambda tx: tx.payloads.get(OTHER, GroupId("task0@0"))) is not None
    async with open_memory_store() as store, open_ledger(store, LedgerConfig(), clock=ManualClock(), log=LOG) as ledger:
        await import_jsonl(store, exported, extensions=EXTENSIONS)
        role = await ledger.take_role(RUN, restored_step=1)
        assert (role.epoch, role.last_decided, role.last_acknowledged) == (2, 3, 2)
        for step in (2, 3):
            assert await ledger.decide(RUN, step, epoch=2, wait_s=0) is not None
            await ledger.acknowledge(RUN, step, f"weights{step}", epoch=2)
        assert (await ledger.read(lambda tx: audit_run(tx, RUN))).violations == ()


async def test_an_exported_run_has_readable_samples(exported: Path) -> None:
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert lines[0]["kind"] == "run"
    assert lines[-1] == {"kind": "end", "lines": len(lines) - 1}
    group = next(line for line in lines if line["kind"] == "group" and line["record"]["group_id"] == "task0@0")
    assert group["record"]["state"] == "durable"
    assert [move["to_state"] for move in group["moves"]] == ["dispatched", "queued", "batched", "trained", "durable"]
    assert [sample["reward"] for sample in group["samples"]] == [0.0, 1.0]
    assert group["samples"][0]["sequences"][0] == {
        "token_ids": [10, 11, 12],
        "logprobs": [0.0, 0.0, -0.5],
        "loss_mask": [False, False, True],
        "versions": [-1, -1, 0],
        "columns": {},
    }


def _cut(lines: list[str]) -> list[str]:
    return lines[:-3]


def _tampered(lines: list[str]) -> list[str]:
    return [line.replace('"payload":"', '"payload":"AAAA', 1) if '"kind":"group"' in line else line for line in lines]


def _forgotten(lines: list[str]) -> list[str]:
    at = next(at for at, line in enumerate(lines) if '"state":"queued"' in line)
    return [*lines[:at], *lines[at + 1 : -1], f'{{"kind":"end","lines":{len(lines) - 2}}}']


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "is truncated"),
        (_tampered, "does not pass the audit.*does not match its digest"),
        (_forgotten, "does not pass the audit"),
        (lambda lines: lines[1:], "does not begin with a run"),
        (lambda lines: ["{}", *lines], r"run\.jsonl:1: not a line of an exported ledger"),
        (lambda lines: [*lines, lines[-1]], "a line after the end"),
        (lambda lines: [lines[0].replace('"format":2', '"format":7'), *lines[1:]], "has format 7"),
        (lambda lines: [], "is empty"),
    ],
)
async def test_a_damaged_file_is_rejected_and_nothing_is_stored(
    exported: Path, damage: Callable[[list[str]], list[str]], message: str
) -> None:
    exported.write_text("".join(f"{line}\n" for line in damage(exported.read_text().splitlines())))
    async with open_memory_store() as store:
        with pytest.raises(RunError, match=message):
            await import_jsonl(store, exported, extensions=EXTENSIONS)
        assert await store.read(lambda tx: tx.runs.ids()) == []


async def test_an_existing_run_or_file_is_not_overwritten(exported: Path, source: Path) -> None:
    async with open_store(sqlite_url(source)) as store:
        with pytest.raises(RunError, match="already has a run 'run-1'"):
            await import_jsonl(store, exported, extensions=EXTENSIONS)
        await import_jsonl(store, exported, as_run=OTHER, extensions=EXTENSIONS)
        assert sorted(await store.read(lambda tx: tx.runs.ids())) == [OTHER, RUN]
    with open_reader(sqlite_url(source)) as reader:
        with pytest.raises(RunError, match="exists and is not overwritten"):
            export_jsonl(reader, RUN, exported, extensions=EXTENSIONS)
        with pytest.raises(RunError, match="has no run 'unknown'"):
            export_jsonl(reader, RunId("unknown"), exported.with_name("none"), extensions=EXTENSIONS)
    assert not exported.with_name("none").exists()


def test_a_parquet_export_has_one_row_per_group_and_per_sequence(source: Path, tmp_path: Path) -> None:
    with open_reader(sqlite_url(source)) as reader:
        report = export_parquet(reader, RUN, tmp_path / "parquet")
    groups, sequences = (pq.read_table(file).to_pylist() for file in report.files)
    assert (report.groups, report.rows) == (len(groups), len(sequences)) == (11, 14)
    states = {group["group_id"]: (group["state"], group["step"]) for group in groups}
    assert states["task0@0"] == ("durable", 1)
    assert states["task4@0"] == ("batched", 3)
    first = next(row for row in sequences if row["group_id"] == "task2@0" and row["sample"] == 1)
    assert (first["reward"], first["token_ids"], first["versions"]) == (1.0, [10, 11, 12], [-1, -1, 0])
    assert first["loss_mask"] == [False, False, True]


def test_a_parquet_export_that_fails_leaves_no_directory(source: Path, tmp_path: Path) -> None:
    with open_reader(sqlite_url(source)) as reader:
        with pytest.raises(RunError, match="has no run 'unknown'"):
            export_parquet(reader, RunId("unknown"), tmp_path / "parquet")
        assert export_parquet(reader, RUN, tmp_path / "parquet").groups == 11


def test_a_payload_that_cannot_be_decoded_has_no_readable_samples() -> None:
    posted = b'{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[%s],"inference_logprobs":[[1.0,-0.5]]}'
    samples = readable_samples(posted % b"0.5", GroupId("env@0"))
    assert samples is not None
    assert (samples[0].reward, samples[0].sequences[0].token_ids.tolist()) == (0.5, [1, 2])
    assert readable_samples(posted % b"", GroupId("env@0")) is None


async def test_a_run_is_not_imported_under_a_name_that_no_run_can_have(exported: Path) -> None:
    async with open_memory_store() as store:
        with pytest.raises(RunError, match="'a/b' is not a run id"):
            await import_jsonl(store, exported, as_run=RunId("a/b"), extensions=EXTENSIONS)
        assert await store.read(lambda tx: tx.runs.ids()) == []


async def test_the_data_of_an_unknown_extension_is_rejected(exported: Path) -> None:
    async with open_memory_store() as store:
        with pytest.raises(RunError, match="has data of 'atropos', which this command cannot import"):
            await import_jsonl(store, exported)
        assert await store.read(lambda tx: tx.runs.ids()) == []


async def test_compaction_deletes_old_payloads_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    for url in (sqlite_url(tmp_path / "ledger"), shared_server().fresh_url()):
        driver = RunDriver()
        write_a_bit_of_everything(driver)
        target = tmp_path / f"{len(url)}.jsonl"
        export_jsonl(driver.store, RUN, target, extensions=EXTENSIONS)
        async with open_store(url) as opened:
            await import_jsonl(opened, target, extensions=EXTENSIONS)
            # Something to give back.
            await opened.write(lambda tx: tx.payloads.put(OTHER, GroupId("left behind"), random.randbytes(3_000_000)))
            await opened.write(lambda tx: tx.payloads.delete(OTHER, GroupId("left behind")))
            with pytest.raises(RunError, match="the last durable checkpoint is of step 1"):
                await compact(opened, now=1.0, run_id=RUN, up_to_step=2)
            num_payloads, _ = await compact(opened, now=1.0, run_id=RUN, up_to_step=1)
        assert num_payloads == 2
        before, after = reclaim(url)
        assert after < before - 2_000_000
        with open_reader(url) as reader:
            assert audit(reader, RUN).violations == ()
            run = reader.read_now(lambda tx: tx.runs.get(RUN))
            assert run is not None
            assert run.payload_floor == 1
            kept = reader.read_now(lambda tx: [g.state for g in tx.groups.each(RUN) if g.has_payload])
        assert GroupState.DURABLE not in kept
        assert len(kept) == 5


async def test_a_ledger_without_a_run_can_be_compacted(tmp_path: Path) -> None:
    run = RunRecord(run_id=RUN, settings=settings(), created_at=1.0)
    async with open_store(sqlite_url(tmp_path)) as store:
        assert await compact(store, now=1.0) == (0, 0)
        await store.write(lambda tx: tx.runs.put(run))
        with pytest.raises(RunError, match="a run is required"):
            await compact(store, now=1.0, up_to_step=1)
    reclaim(sqlite_url(tmp_path))
