"""Events: JSON lines; warnings also go to stderr; a failed write stops nothing."""

import io
import logging
from pathlib import Path

import pytest

from rollbook.telemetry.events import EventLog, read_json_lines


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
