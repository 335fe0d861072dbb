"""The reward: the change of what the situation is worth. Pure.

    potential(state) = share of the goal that was reached since the start; 0 when something that had to stay was broken
    value(state)     = hint factor x (1 when everything holds, else `partial` x potential)
    reward           = value after the move - value before it

Rewards telescope: an episode returns the value of the state it ends in, whatever the way there. Breaking and mending again earns
nothing, waiting earns nothing, and a read earns nothing. An untouched environment is worth 0, a solved one 1 (times the hints'
price).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.envs.builtin.awscli.hints import factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Which facts hold. `goals` and `keeps` in the order of the task's checks."""

    goals: tuple[bool, ...]
    keeps: tuple[bool, ...] = ()

    @property
    def is_solved(self) -> bool:
        return all(self.goals) and all(self.keeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRule:
    """`partial`: what an environment that is almost right is worth at most. `hint_price`: the factor for each hint."""

    partial: float
    hint_price: float

    def value(self, standing: Standing, *, start: Standing, hints_used: int) -> float:
        worth = 1.0 if standing.is_solved else self.partial * potential(standing, start=start)
        return factor(hints_used, self.hint_price) * worth


def potential(standing: Standing, *, start: Standing) -> float:
    """From 0 (as at the start, or worse) to 1 (every goal holds). Goals that held at the start earn nothing."""
    if len(standing.goals) != len(start.goals) or len(standing.keeps) != len(start.keeps):
        raise ValueError(f"standings of different tasks: {len(standing.goals)} and {len(start.goals)} goals")
    if not all(standing.keeps):
        return 0.0
    at_start = sum(start.goals)
    open_at_start = len(start.goals) - at_start
    if open_at_start == 0:
        return 0.0
    return max(0, sum(standing.goals) - at_start) / open_at_start


def flaw_at_start(
    start: Standing, goals: Sequence[str], keeps: Sequence[str], *, must_be_open: Sequence[bool]
) -> str | None:
    """Why this environment is no fair start: already solved, a fault that is not one, or something to keep that is not there."""
    if start.goals and all(start.goals):
        return "the task is solved before the agent did anything"
    healed = [
        says for says, holds, is_fault in zip(goals, start.goals, must_be_open, strict=True) if holds and is_fault
    ]
    if healed:
        return f"the drift had no effect: it is still true that {'; '.join(healed)}"
    missing = [says for says, holds in zip(keeps, start.keeps, strict=True) if not holds]
    if missing:
        return f"what must be kept is not there: {'; '.join(missing)}"
    return None
