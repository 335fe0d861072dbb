"""How a child tells its supervisor what it does: JSON lines over a pipe. One way, small, never blocking the child for long."""

import json
import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Note(StrEnum):
    READY = "ready"
    DOING = "doing"
    BEAT = "beat"
    """A sign of life from the event loop itself."""
    FAULT = "fault"
    """Stop the run: `message` is for a person."""
    END = "end"
    """The role ended as it should: `message` says how."""


@dataclass(frozen=True, slots=True)
class ChildNote:
    kind: Note
    message: str

    @classmethod
    def parse(cls, line: bytes) -> "ChildNote | None":
        try:
            row: dict[str, Any] = json.loads(line)
            return cls(Note(row["kind"]), str(row["message"]))
        except (ValueError, KeyError, TypeError):
            return None


class Channel:
    """The child's end. Without a file descriptor (a role started by hand) notes go nowhere."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def ready(self, message: str = "") -> None:
        self._send(Note.READY, message)

    def beat(self) -> None:
        self._send(Note.BEAT, "")

    def doing(self, message: str) -> None:
        self._send(Note.DOING, message)

    def fault(self, message: str) -> None:
        self._send(Note.FAULT, message)

    def end(self, message: str) -> None:
        self._send(Note.END, message)

    def _send(self, kind: Note, message: str) -> None:
        if self._fd is None:
            return
        # One line stays below the 4,096 bytes that a pipe keeps whole, escapes included, so that notes never mix.
        short = message.encode()[:1800].decode(errors="ignore")
        line = json.dumps({"kind": kind, "message": short}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            try:
                os.write(self._fd, line)
            except OSError:
                self._fd = None
