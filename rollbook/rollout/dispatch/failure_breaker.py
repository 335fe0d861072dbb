"""Stops the run when rollouts keep failing, with the causes, before the whole dataset is consumed. Pure.

A group that a filter dropped is not a failure. A group whose samples the rollout function declined is not a failure either, unless
no other groups are left in the window.
"""

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum

from rollbook.contracts.errors import RunError
from rollbook.rollout.groups.failures import SHOWN_CAUSES, list_causes

MAX_CONSECUTIVE = 5
WINDOW = 20
MAX_SHARE = 0.5
MAX_CAUSES = 100
"""Distinct causes kept since the last useful group."""


class RolloutsFailingError(RunError):
    """Too many rollouts fail. Retries do not help."""


class GroupEnd(StrEnum):
    USEFUL = "useful"
    """Stored, or dropped by a filter: its episodes were played and scored."""
    DECLINED = "declined"
    """The rollout function returned None for every sample."""
    FAILED = "failed"


class FailureBreaker:
    def __init__(self, *, log_hint: str) -> None:
        self._log_hint = log_hint
        """Where to read more, for the error message."""
        self._window: deque[GroupEnd] = deque(maxlen=WINDOW)
        self._consecutive = 0
        self._causes: Counter[str] = Counter()

    def record(self, end: GroupEnd, causes: Mapping[str, int]) -> None:
        """Count a group. Raises `RolloutsFailingError` at a limit."""
        self._window.append(end)
        if end is GroupEnd.FAILED:
            self._consecutive += 1
            for cause, count in causes.items():
                if cause in self._causes or len(self._causes) < MAX_CAUSES:
                    self._causes[cause] += count
        elif end is GroupEnd.USEFUL:
            self._consecutive = 0
            if GroupEnd.FAILED not in self._window:
                self._causes.clear()
        problem = self._problem()
        if problem is None:
            return
        causes_text = "  the rollout function returned None for every sample"
        if self._causes:
            causes_text = list_causes(self._causes, most=SHOWN_CAUSES)
        if len(self._causes) > 1:
            # The first failure often causes the others.
            first = next(iter(self._causes)).splitlines()[0]
            causes_text += f"\nThe first was: {first}"
        raise RolloutsFailingError(f"{problem}, so the run stops. Causes:\n{causes_text}\nSee {self._log_hint}")

    def _problem(self) -> str | None:
        if self._consecutive >= MAX_CONSECUTIVE:
            return f"{self._consecutive} groups in a row failed"
        if len(self._window) < WINDOW:
            return None
        failed = sum(end is GroupEnd.FAILED for end in self._window)
        if failed >= MAX_SHARE * WINDOW:
            return f"{failed} of the last {WINDOW} groups failed"
        if GroupEnd.USEFUL not in self._window:
            return f"none of the last {WINDOW} groups gave a sample"
        return None
