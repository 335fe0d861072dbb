"""Events: JSON lines; warnings also go to stderr; a failed write stops nothing."""

import io
import logging
from pathlib import Path

import pytest

from rollbook.telemetry.events import EventLog, LineFile, read_json_lines
from rollbook.telemetry.json_tail import JsonTail
from rollbook.telemetry.spans import SpanRecorder

FULL = Path("/dev/full")


def test_an_event_is_a_line_with_its_name_level_process_and_fields(tmp_path: Path) -> None:
    log = EventLog("ledger", tmp_path / "logs" / "ledger.jsonl", echo=io.StringIO())
    log.info("ledger.batch_decided", step=41, groups=8)
    log.close()
    (event,) = read_json_lines(tmp_path / "logs" / "ledger.jsonl")
    assert event.pop("time") > 0
    assert event == {
        "level": "info",
        "process": "ledger",
        "event": "ledger.batch_decided",
        "step": 41,
        "groups": 8,
    }


def test_only_warnings_and_errors_go_to_stderr() -> None:
    echo = io.StringIO()
    log = EventLog("rollout", echo=echo)
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)(f"rollout.{level}", group="guess-7@0")
    assert echo.getvalue().splitlines() == [
        "warning: [rollout] rollout.warning group=guess-7@0",
        "error: [rollout] rollout.error group=guess-7@0",
    ]


def test_values_that_are_not_json_are_written_as_text(tmp_path: Path) -> None:
    log = EventLog("ledger", tmp_path / "ledger.jsonl")
    log.info("ledger.opened", path=tmp_path)
    log.close()
    assert read_json_lines(tmp_path / "ledger.jsonl")[0]["path"] == str(tmp_path)


def test_a_failed_write_is_reported_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("ledger", tmp_path / "ledger.jsonl")
    with caplog.at_level(logging.WARNING, logger="rollbook.telemetry"):
        log.info("ledger.odd", table={(1, 2): 3})
        log.info("ledger.odd", table={(1, 2): 3})
        log.info("ledger.even", step=2)
    log.close()
    assert len(caplog.records) == 1
    assert [event["event"] for event in read_json_lines(tmp_path / "ledger.jsonl")] == ["ledger.even"]


def test_a_cut_line_is_ignored_and_the_next_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    first = EventLog("trainer", path)
    first.info("trainer.started")
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"time": 1.0, "level": "info", "pro')
    assert [event["event"] for event in read_json_lines(path)] == ["trainer.started"]
    second = EventLog("trainer", path)
    second.info("trainer.started")
    second.info("trainer.resumed")
    second.close()
    assert [event["event"] for event in read_json_lines(path)] == [
        "trainer.started",
        "trainer.started",
        "trainer.resumed",
    ]


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "missing.jsonl") == []


def test_a_file_of_full_size_is_renamed_and_two_writers_lose_no_line_of_the_last_two_files(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker.jsonl"
    writers = [LineFile(path, max_bytes=1000) for _ in range(2)]
    for number in range(200):
        writers[number % 2].write(f'{{"number": {number}}}\n')
    for writer in writers:
        writer.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["worker.jsonl", "worker.jsonl.1"]
    # Each writer notices by its own count of bytes: together they may exceed the limit by one more.
    assert all(file.stat().st_size <= 2100 for file in path.parent.iterdir())
    kept = [row["number"] for file in path.parent.iterdir() for row in read_json_lines(file)]
    assert max(kept) == 199
    assert len(kept) == len(set(kept)) > 50


def test_a_file_that_cannot_be_renamed_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog("ledger", tmp_path / "ledger.jsonl", max_bytes=300)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        for number in range(10):
            log.info("ledger.event", number=number)
    assert [row["number"] for row in read_json_lines(tmp_path / "ledger.jsonl")] == list(range(10))
    for number in range(10, 14):
        log.info("ledger.event", number=number)
    log.close()
    rows = read_json_lines(tmp_path / "ledger.jsonl.1") + read_json_lines(tmp_path / "ledger.jsonl")
    assert [row["number"] for row in rows] == list(range(14))


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_disk_that_stays_full_is_reported_once_and_ends_no_process(caplog: pytest.LogCaptureFixture) -> None:
    log, spans = EventLog("trainer", FULL), SpanRecorder("trainer", FULL)
    for number in range(3):
        log.info("trainer.step", step=number)
        spans.record("trainer.train", 0.0, 1.0, step=number)
    log.close()
    spans.close()
    assert [record.message for record in caplog.records] == [
        "events of trainer are not all written: [Errno 28] No space left on device",
        "spans of trainer are not all written: [Errno 28] No space left on device",
    ]


@pytest.mark.parametrize("levels", [65, 5_000, 100_000])
def test_a_deeply_nested_line_is_skipped_like_a_damaged_one(tmp_path: Path, levels: int) -> None:
    file = tmp_path / "metrics.jsonl"
    deep = '{"step": 2, "x": ' + "[" * levels + "]" * levels + ', "nan": NaN}'
    file.write_text(f'{{"step": 1}}\n{deep}\n{deep.replace("NaN", "1")}\n{{"step": 3}}\n')
    tail = JsonTail(file)
    assert [row["step"] for row in tail.poll()] == [1, 3]
    assert tail.skipped == 2
    assert [row["step"] for row in read_json_lines(file)] == [1, 3]
