"""The circuit breaker: rollouts that keep failing stop the run with their cause, instead of eating the dataset in silence.

Pure: it is told how each group ended. Groups that a filter dropped are no failures; groups whose every sample the function declined
are none either, unless nothing else happens any more.
"""

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum

from rollbook.contracts.errors import RunError
from rollbook.rollout.groups.failures import describe_causes

MOST_CONSECUTIVE = 5
WINDOW = 20
MOST_SHARE = 0.5
KEPT_CAUSES = 100
"""Distinct causes remembered since the last good group; more of them say nothing new."""


class RolloutsFailingError(RunError):
    """Rollouts fail more often than any retry can mend."""


class GroupEnd(StrEnum):
    USEFUL = "useful"
    """Stored, or dropped by a filter: its episodes could be played and scored."""
    DECLINED = "declined"
    """The rollout function returned None for all of it."""
    FAILED = "failed"


class CircuitBreaker:
    def __init__(self, *, look_at: str) -> None:
        self._look_at = look_at
        """Where a person finds more, for the message."""
        self._window: deque[GroupEnd] = deque(maxlen=WINDOW)
        self._consecutive = 0
        self._causes: Counter[str] = Counter()

    def record(self, end: GroupEnd, causes: Mapping[str, int]) -> None:
        """Count a group. Raises `RolloutsFailingError` when it was one too many."""
        self._window.append(end)
        if end is GroupEnd.FAILED:
            self._consecutive += 1
            for cause, count in causes.items():
                if cause in self._causes or len(self._causes) < KEPT_CAUSES:
                    self._causes[cause] += count
        elif end is GroupEnd.USEFUL:
            self._consecutive = 0
            if GroupEnd.FAILED not in self._window:
                self._causes.clear()
        verdict = self._verdict()
        if verdict is not None:
            told = (
                describe_causes(self._causes, most=5) if self._causes else "the function returned None for every sample"
            )
            if len(self._causes) > 1:
                # What came first is often what brought the rest about.
                told += f". The first was: {next(iter(self._causes))}"
            raise RolloutsFailingError(f"{verdict}, so the run stops. Causes: {told}. Look at {self._look_at}")

    def _verdict(self) -> str | None:
        if self._consecutive >= MOST_CONSECUTIVE:
            return f"{self._consecutive} groups in a row failed"
        if len(self._window) < WINDOW:
            return None
        failed = sum(end is GroupEnd.FAILED for end in self._window)
        if failed >= MOST_SHARE * WINDOW:
            return f"{failed} of the last {WINDOW} groups failed"
        if GroupEnd.USEFUL not in self._window:
            return f"none of the last {WINDOW} groups gave a sample"
        return None
