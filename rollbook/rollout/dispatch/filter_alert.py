"""Says when hardly any group teaches: filtered work costs as much as any other, and a run that only filters looks as if it hung."""

from collections import deque
from dataclasses import dataclass

WINDOW = 200
"""Groups looked back on."""
DRY, WET = 0.9, 0.5
"""Filtered part of the window at which a drought is told, and below which it is over."""


@dataclass(frozen=True, slots=True)
class Drought:
    filtered: int
    of: int
    reward: float | None
    """Mean of all episodes in the window."""

    @property
    def advice(self) -> str:
        if self.reward is None:
            return "look at why groups are filtered: rollbook explain GROUP_ID"
        return (
            f"their mean reward is {self.reward:.2f}. If that is near the best, the tasks are mastered: give harder or more of "
            "them, or end the run. If it is near the worst, they are too hard: give easier ones (tasks.order = 'curriculum'), more "
            "samples a prompt, or a reward for parts of the way"
        )


class FilterWatch:
    """Looks at one finished group after the other. Speaks once a drought."""

    def __init__(self, window: int = WINDOW) -> None:
        self._ends: deque[tuple[bool, float | None]] = deque(maxlen=window)
        self._filtered = 0
        self._is_dry = False

    def record(self, *, is_filtered: bool, reward: float | None) -> Drought | None:
        if len(self._ends) == self._ends.maxlen:
            self._filtered -= self._ends[0][0]
        self._ends.append((is_filtered, reward))
        self._filtered += is_filtered
        if len(self._ends) < (self._ends.maxlen or 0):
            return None
        part = self._filtered / len(self._ends)
        if self._is_dry:
            self._is_dry = part >= WET
            return None
        if part < DRY:
            return None
        self._is_dry = True
        rewards = [reward for _, reward in self._ends if reward is not None]
        return Drought(self._filtered, len(self._ends), sum(rewards) / len(rewards) if rewards else None)
