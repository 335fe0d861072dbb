"""What processes of the run wait for in vain, and what is wrong with its settings: on the console when it begins, and in the
summary at the end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollbook.telemetry.events import EventLog

SAY_AGAIN_S = 60.0
"""The console repeats a wait that begins again after this time."""
MAX_PROBLEMS = 10
"""In the summary: those that lasted longest."""


@dataclass(slots=True)
class _Problem:
    process: str
    awaited: str
    cause: str
    since: float | None
    """None: it is over."""
    said_at: float
    seconds: float = 0.0
    """Of the times before."""

    def lasted_s(self, now: float) -> float:
        return self.seconds + (0.0 if self.since is None else now - self.since)


class ProblemLog:
    def __init__(self, *, log: EventLog, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._say = say
        self._now = now
        self._problems: dict[tuple[str, str], _Problem] = {}
        self._settings: list[str] = []

    def report_unconfined(self, settings: Sequence[str]) -> None:
        """Code of the policy runs without a sandbox, because of these settings."""
        text = f"code of the policy runs unconfined, with all rights of its process: {', '.join(settings)}"
        self._settings.append(text)
        self._log.warning("run.unconfined_code", settings=list(settings))
        self._say(text)

    def report(self, process: str, awaited: str, cause: str) -> None:
        """A process waits for something, because of the cause. Without a cause: it no longer does."""
        now = self._now()
        problem = self._problems.get((process, awaited))
        if not cause:
            if problem is not None and problem.since is not None:
                problem.seconds, problem.since = problem.lasted_s(now), None
            return
        if problem is None:
            problem = _Problem(process, awaited, cause, now, now)
            self._problems[process, awaited] = problem
            self._announce(problem)
            return
        if problem.since is None:
            problem.since = now
            if now - problem.said_at >= SAY_AGAIN_S:
                problem.said_at = now
                self._announce(problem)
        problem.cause = cause

    def summary(self) -> tuple[str, ...]:
        """One line for each wait, with its last cause, after those about settings."""
        now = self._now()
        longest = sorted(self._problems.values(), key=lambda problem: -problem.lasted_s(now))
        waits = (
            f"{problem.process} waited {problem.lasted_s(now):.0f} s for {problem.awaited}: {problem.cause.splitlines()[0]}"
            for problem in longest[:MAX_PROBLEMS]
        )
        return (*self._settings, *waits)

    def _announce(self, problem: _Problem) -> None:
        self._log.warning("run.process_waits", process=problem.process, awaited=problem.awaited, cause=problem.cause)
        self._say(f"{problem.process} waits for {problem.awaited}: {problem.cause}")
