"""Seeded faults of an episode: drift before it starts, chaos while the agent works. Pure.

The same task, seed and moves meet the same faults. Drift applies some of the task's faults to the initial state. Chaos has two
kinds: a *refused* request fails as if the service were busy, and a retry helps; an *undone* change is one of the task's chaos
commands, run after the agent's move as if by another user. The last move of an episode is never disturbed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollbook.envs.builtin.awscli.tasks.task_bank import AwsTask, Fault, TaskStep, TaskTier

# The chance of a chaos fault at each move, before the operator's factor.
CHANCE = {
    TaskTier.WARM_UP: 0.0,
    TaskTier.BEGINNER: 0.05,
    TaskTier.INTERMEDIATE: 0.1,
    TaskTier.ADVANCED: 0.15,
    TaskTier.EXPERT: 0.2,
}
# With more faults an episode would depend mostly on chance.
MAX_FAULTS = 2
REFUSALS = (
    ("ThrottlingException", "Rate exceeded"),
    ("ServiceUnavailable", "Service is temporarily unavailable. Please retry the request."),
    ("InternalError", "An internal error occurred. Please retry your request."),
)


def seeded(task_id: str, seed: int, purpose: str) -> random.Random:
    """A separate generator for each purpose: an extra draw for chaos does not change the draws for drift."""
    return random.Random(f"{task_id}/{seed}/{purpose}")


def chosen_variant(task: AwsTask, seed: int) -> dict[str, str]:
    """The names of this episode."""
    variant = seeded(task.id, seed, "variant").choice(task.variants)
    return {name: str(value) for name, value in variant.items()}


def chosen_drift(task: AwsTask, seed: int) -> Sequence[Fault]:
    """The drift faults of this episode, in the order they are applied; empty for a task without drift."""
    if not task.drift:
        return ()
    rng = seeded(task.id, seed, "drift")
    low, high = task.drift_count
    return rng.sample(task.drift, rng.randint(low, high))


class FaultKind(StrEnum):
    REFUSED = "refused"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """One chaos fault: the error message of a refused request, or the command that undoes a change."""

    kind: FaultKind
    text: str = ""
    step: TaskStep | None = None


class Chaos:
    """The chaos faults of one episode. `scale` multiplies the tier's chance; 0 disables chaos."""

    def __init__(self, task: AwsTask, *, seed: int, scale: float) -> None:
        self._rng = seeded(task.id, seed, "chaos")
        self._chance = min(1.0, CHANCE[task.tier] * scale)
        self._undo_steps = list(task.chaos)
        self.num_faults = 0

    def draw(self, *, is_last_move: bool) -> ChaosFault | None:
        """Called once for each command that may change something."""
        if self._rng.random() >= self._chance or self.num_faults >= MAX_FAULTS or is_last_move:
            return None
        self.num_faults += 1
        if self._undo_steps and self._rng.random() < 0.5:
            return ChaosFault(kind=FaultKind.UNDONE, step=self._undo_steps[self._rng.randrange(len(self._undo_steps))])
        code, message = REFUSALS[self._rng.randrange(len(REFUSALS))]
        return ChaosFault(
            kind=FaultKind.REFUSED, text=f"An error occurred ({code}) when calling the operation: {message}"
        )
