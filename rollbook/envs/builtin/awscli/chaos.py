"""Chaos: faults in the environment while the agent works. Seeded: the same task, seed and moves meet the same faults. Pure.

Two kinds. A *refused* request fails as a busy service does; trying again helps. An *undoing* is somebody else's change: one of the
task's own chaos commands is run after the agent's move. The last move an agent has is never disturbed.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

from rollbook.envs.builtin.awscli.drift import seeded
from rollbook.envs.builtin.awscli.task_bank import AwsTask, Step, Tier

# Chance of a fault at a move, before the operator's factor.
CHANCE = {Tier.WARM_UP: 0.0, Tier.BEGINNER: 0.05, Tier.INTERMEDIATE: 0.1, Tier.ADVANCED: 0.15, Tier.EXPERT: 0.2}
# More than this many faults would make a task a lottery.
MOST_FAULTS = 2
REFUSALS = (
    ("ThrottlingException", "Rate exceeded"),
    ("ServiceUnavailable", "Service is temporarily unavailable. Please retry the request."),
    ("InternalError", "An internal error occurred. Please retry your request."),
)


class FaultKind(StrEnum):
    REFUSED = "refused"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """What strikes now."""

    kind: FaultKind
    text: str = ""
    step: Step | None = None


class Chaos:
    """The faults of one episode. `scale` multiplies the tier's chance; 0 is calm."""

    def __init__(self, task: AwsTask, *, seed: int, scale: float) -> None:
        self._rng: random.Random = seeded(task.id, seed, "chaos")
        self._chance = min(1.0, CHANCE[task.tier] * scale)
        self._undoings = list(task.chaos)
        self._struck = 0

    def strike(self, *, is_last_move: bool) -> ChaosFault | None:
        """Asked once for each command that would change something."""
        if self._rng.random() >= self._chance or self._struck >= MOST_FAULTS or is_last_move:
            return None
        self._struck += 1
        if self._undoings and self._rng.random() < 0.5:
            return ChaosFault(kind=FaultKind.UNDONE, step=self._undoings[self._rng.randrange(len(self._undoings))])
        code, message = REFUSALS[self._rng.randrange(len(REFUSALS))]
        return ChaosFault(
            kind=FaultKind.REFUSED, text=f"An error occurred ({code}) when calling the operation: {message}"
        )
