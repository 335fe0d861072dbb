"""Reports from a supervised process to its supervisor."""

import signal
from enum import StrEnum

import msgspec

from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.contracts.decoding import msgpack_decoder

MAX_MESSAGE_CHARS = 16_000
"""A fault may contain several tracebacks of user code."""

LEAVE_SIGNAL = signal.SIGUSR2
"""Asks a member of a run to accept no new work, finish what it does, and end."""


class ReportKind(StrEnum):
    READY = "ready"
    DOING = "doing"
    PROBLEM = "problem"
    """The process waits for `awaited`, because of `message`; an empty message: it no longer does."""
    PROGRESS = "progress"
    """The process did something that the run needs, since its start."""
    DELIVERED = "delivered"
    """It did what the run needs from it: the trainer trained a step."""
    HEARTBEAT = "heartbeat"
    """The event loop runs."""
    FAULT = "fault"
    """The run must stop; `message` is for a person."""
    END = "end"
    """The role has done its work; `message` says how it ended."""
    STOPPED = "stopped"
    """The role ended early because of SIGTERM; `message` says how."""


class Report(msgspec.Struct, array_like=True, frozen=True):
    kind: ReportKind
    message: str
    awaited: str = ""


encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgpack_decoder(Report).decode


class Channel:
    """The child's end. Without a connection (a role that has no supervisor) reports are discarded."""

    def __init__(self, frames: BlockingFrames | None) -> None:
        self._frames = frames
        self.activity = ""
        """What the process last reported that it does."""

    def ready(self, message: str = "") -> None:
        self.activity = message
        self._send(ReportKind.READY, message)

    def heartbeat(self) -> None:
        self._send(ReportKind.HEARTBEAT, "")

    def doing(self, message: str) -> None:
        self.activity = message
        self._send(ReportKind.DOING, message)

    def problem(self, awaited: str, cause: str) -> None:
        self._send(ReportKind.PROBLEM, cause, awaited)

    def progress(self) -> None:
        self._send(ReportKind.PROGRESS, "")

    def delivered(self) -> None:
        self._send(ReportKind.DELIVERED, "")

    def fault(self, message: str) -> None:
        self._send(ReportKind.FAULT, message)

    def end(self, message: str) -> None:
        self._send(ReportKind.END, message)

    def stopped(self, message: str) -> None:
        self._send(ReportKind.STOPPED, message)

    def _send(self, kind: ReportKind, message: str, awaited: str = "") -> None:
        if self._frames is not None:
            try:
                self._frames.send(encode_report(Report(kind, message[:MAX_MESSAGE_CHARS], awaited)))
            except OSError:
                self._frames = None  # the supervisor is gone; `die_with_parent` ends this process
