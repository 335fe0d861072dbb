"""Token-native assembly for histories that never repeat: each turn is a row of its own, its prompt the context.

Right where every prompt is written anew (a template that drops earlier reasoning, an agent that summarises). It costs tokens: what
turns share is stored and computed once for each of them. `branching` shares what can be shared.
"""

from rollbook.rollout.assemblers.branching import BranchingAssembler


class PerTurnAssembler(BranchingAssembler):
    """Branching that never continues: every turn forks."""

    def _continued(self, prompt: list[int]) -> int | None:
        return None
