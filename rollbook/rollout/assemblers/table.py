"""Name to assembler: one explicit table. Each takes whole turns: what the engine consumed, what it produced."""

from typing import Literal, TypeAlias

from rollbook.contracts.policy import SamplingParams
from rollbook.rollout.assemblers.branching import BranchingAssembler
from rollbook.rollout.assemblers.linear import TrajectoryAssembler
from rollbook.rollout.assemblers.per_turn import PerTurnAssembler
from rollbook.rollout.assembly import TurnAssembler

AssemblerName: TypeAlias = Literal["linear", "branching", "per_turn"]

ASSEMBLERS: dict[str, type[TrajectoryAssembler] | type[BranchingAssembler] | type[PerTurnAssembler]] = {
    "linear": TrajectoryAssembler,
    "branching": BranchingAssembler,
    "per_turn": PerTurnAssembler,
}


def build_assembler(name: AssemblerName, sampling: SamplingParams) -> TurnAssembler:
    return ASSEMBLERS[name](sampling)
