"""Structured events: `log.info("ledger.batch_decided", step=41, groups=8)`.

Events are JSON lines in `logs/<process>.jsonl` of the run directory; warnings and errors also go to stderr. A file that has grown
to `MAX_FILE_BYTES` is renamed to `<name>.1`, which replaces the one before. A failure of telemetry is reported once and never stops
the process.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rollbook.concurrency.clock import WALL_CLOCK
from rollbook.contracts.decoding import is_too_deep

MAX_FILE_BYTES = 32 << 20
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

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report an `OSError` of the block instead of raising it: a full disk must not replace the result of a run."""
        try:
            yield
        except OSError as error:
            self.report(error)


class EventLog:
    """Writes the events of one process. Without a path, only warnings and errors are written, to stderr."""

    def __init__(
        self,
        process: str,
        path: Path | None = None,
        *,
        echo: TextIO | None = None,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.process = process
        self._echo = echo
        self._failure = FailureReport(f"events of {process} are not all written")
        self._file = None if path is None else LineFile(path, max_bytes=max_bytes)

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with self._failure.reported():
                file.close()

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                record = {
                    "time": round(WALL_CLOCK.now(), 4),
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


class LineFile:
    """Appends JSON lines to a file of bounded size. Several processes may append to the same file."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._open()

    def write(self, line: str) -> None:
        """The line ends with a line break."""
        self._file.write(line)
        self._size += len(line)
        if self._size > self._max_bytes:
            self._start_next()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        """An incomplete last line (the process was killed) is ended first, so that the next line is not lost with it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self._path.open("a", encoding="utf-8", buffering=1)
        self._size = self._file.tell()
        if self._size > 0:
            with self._path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    self._file.write("\n")

    def _start_next(self) -> None:
        self._size = 0  # after a failure, try again after as many bytes
        full = self._file
        # Another process may have renamed it already.
        if self._path.stat().st_ino == os.fstat(full.fileno()).st_ino:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._open()
        full.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line. Ignores a line that was cut when a process was killed."""
    return json_rows(path.read_bytes()) if path.exists() else []


def json_rows(lines: bytes) -> list[dict[str, Any]]:
    rows: list[Any] = []
    for line in lines.splitlines():
        with suppress(ValueError):
            if not is_too_deep(line):
                rows.append(json.loads(line.decode(errors="replace")))
    return [row for row in rows if isinstance(row, dict)]
