"""Structured events: `log.info("ledger.batch_decided", step=41, groups=8)`.

Events are JSON lines in `logs/<process>.jsonl` of the run directory; warnings and errors also go to stderr. A failure of telemetry
is reported once and never stops the process.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class FailureReport:
    """Logs the first failure of one output as a warning."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._is_reported = False

    def report(self, error: Exception) -> None:
        if not self._is_reported:
            self._is_reported = True
            logging.getLogger("rollbook.telemetry").warning("%s: %s", self._message, error)


class EventLog:
    """Writes the events of one process. Without a path, only warnings and errors are written, to stderr."""

    def __init__(self, process: str, path: Path | None = None, *, echo: TextIO | None = None) -> None:
        self.process = process
        self._echo = echo
        self._file: TextIO | None = None
        self._failure = FailureReport(f"events of {process} are not all written")
        if path is not None:
            self._file = open_lines(path)

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                record = {
                    "time": round(time.time(), 4),
                    "level": level,
                    "process": self.process,
                    "event": event,
                    **fields,
                }
                self._file.write(json.dumps(record, default=str) + "\n")
            if LEVELS[level] >= LEVELS["warning"]:
                text = " ".join(f"{key}={value}" for key, value in fields.items())
                (self._echo or sys.stderr).write(f"{level}: [{self.process}] {event} {text}\n")
        except (OSError, ValueError, TypeError) as error:
            self._failure.report(error)


def open_lines(path: Path) -> TextIO:
    """Open a file of JSON lines for appending. An incomplete last line (the process was killed) is ended first, so that the next
    line is not lost with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8", buffering=1)
    if file.tell() > 0:
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read(1) != b"\n":
                file.write("\n")
    return file


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line. Ignores a line that was cut when a process was killed."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
