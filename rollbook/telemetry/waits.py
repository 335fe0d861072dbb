"""Operations of this process that keep failing and are repeated: a server that does not respond, a worker that does not start.

Code that repeats an operation calls `WAITS.failing` after each failure and `WAITS.recovered` after a success. Most failures are
over before `REPORT_S`. A longer one is passed to the listener: a process of a run sends it to its supervisor, which shows it in the
status line, on the console and in the summary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

REPORT_S = 2.0
"""A failure that is repeated for this long is reported."""

WaitListener = Callable[[str, str], None]
"""Gets what the process waits for, and why; an empty cause when the wait is over."""


@dataclass(slots=True)
class _Wait:
    since: float
    reported: str = ""


class Waits:
    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waits: dict[str, _Wait] = {}
        self._listener: WaitListener = lambda awaited, cause: None

    def listen(self, listener: WaitListener) -> None:
        """`listener` replaces the one before. It must not block."""
        self._listener = listener

    def failing(self, awaited: str, cause: str, *, at_once: bool = False) -> None:
        """An operation failed and is repeated. `awaited` names what it needs, as in "waits for …". `at_once`: report its first
        failure too."""
        wait = self._waits.setdefault(awaited, _Wait(self._now()))
        if cause != wait.reported and (at_once or self._now() - wait.since >= REPORT_S):
            wait.reported = cause
            self._listener(awaited, cause)

    def recovered(self, awaited: str) -> None:
        wait = self._waits.pop(awaited, None)
        if wait is not None and wait.reported:
            self._listener(awaited, "")


WAITS = Waits()
"""Those of this process."""
