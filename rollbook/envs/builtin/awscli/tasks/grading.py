"""The reward of a move: the change of the state's value. Pure.

    potential(state) = share of the initially open goals that hold; 0 if something that had to stay was broken. Goals of absence
                       count only if all other goals hold
    value(state)     = hint factor x (1 if everything holds, else `partial` x potential)
    reward           = value after the move - value before it

Rewards telescope: their sum is the value of the final state, independent of the path. Breaking and repairing, waiting and reading
earn nothing. The initial state has value 0, a solved one 1 (times the hint factor). A goal of absence ("the object is gone") also
holds in an empty account, so it must not pay for deletion alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.envs.builtin.awscli.tasks.task_bank import NUM_HINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResults:
    """Which checks hold: `goals` and `keeps`, in the order of the task's checks. `absences` are the positions of the goals that
    require something not to exist.
    """

    goals: tuple[bool, ...]
    keeps: tuple[bool, ...] = ()
    absences: frozenset[int] = frozenset()

    @property
    def is_solved(self) -> bool:
        return all(self.goals) and all(self.keeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRule:
    """`partial`: the upper bound of the value of an unsolved state. `hint_price`: the factor for each hint."""

    partial: float
    hint_price: float

    def value(self, results: CheckResults, *, start: CheckResults, hints_used: int) -> float:
        ungraded = 1.0 if results.is_solved else self.partial * potential(results, start=start)
        return hint_factor(hints_used, self.hint_price) * ungraded


def potential(results: CheckResults, *, start: CheckResults) -> float:
    """From 0 (as at the start, or worse) to 1 (every goal holds). Goals that held at the start earn nothing."""
    if len(results.goals) != len(start.goals) or len(results.keeps) != len(start.keeps):
        raise ValueError(f"results of different tasks: {len(results.goals)} and {len(start.goals)} goals")
    if not all(results.keeps):
        return 0.0
    open_goals = {i for i, held in enumerate(start.goals) if not held}
    if not open_goals:
        return 0.0
    has_the_rest = all(held for i, held in enumerate(results.goals) if i not in results.absences)
    reached = {i for i, held in enumerate(results.goals) if held and (has_the_rest or i not in results.absences)}
    broken = sum(was_held and not holds for was_held, holds in zip(start.goals, results.goals, strict=True))
    return max(0, len(reached & open_goals) - broken) / len(open_goals)


def start_problem(
    start: CheckResults, goals: Sequence[str], keeps: Sequence[str], *, must_be_open: Sequence[bool]
) -> str | None:
    """Why an episode cannot start from this state: already solved, a fault without effect, or a `keeps` check that fails."""
    if start.goals and all(start.goals):
        return "the task is solved before the agent did anything"
    healed = [
        says for says, holds, is_fault in zip(goals, start.goals, must_be_open, strict=True) if holds and is_fault
    ]
    if healed:
        return f"the drift had no effect: it is still true that {'; '.join(healed)}"
    missing = [says for says, holds in zip(keeps, start.keeps, strict=True) if not holds]
    if missing:
        return f"these checks of `keeps` fail at the start: {'; '.join(missing)}"
    return None


def hint_factor(used: int, price: float) -> float:
    """The factor on the value after `used` hints: 0.85, 0.7225, 0.614... at the default price of 0.85."""
    if not 0 <= used <= NUM_HINTS:
        raise ValueError(f"{used} hints used; there are {NUM_HINTS}")
    return float(price**used)


def hint_text(hints: Sequence[str], used: int, price: float) -> str:
    """The next hint after `used`, with its price."""
    if used >= len(hints):
        return "there are no further hints"
    factor = hint_factor(used + 1, price)
    return f"hint {used + 1} of {len(hints)} (the reward is now multiplied by {factor:.3g}): {hints[used]}"
