"""Name to assembler: one explicit table. Each takes whole turns: what the engine consumed, what it produced."""

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import SamplingParams
from rollbook.rollout.assemblers.assembler import TurnAssembler
from rollbook.rollout.assemblers.branching import BranchingAssembler
from rollbook.rollout.assemblers.linear import TrajectoryAssembler
from rollbook.rollout.assemblers.per_turn import PerTurnAssembler

ASSEMBLERS: dict[str, type[TrajectoryAssembler] | type[BranchingAssembler] | type[PerTurnAssembler]] = {
    "linear": TrajectoryAssembler,
    "branching": BranchingAssembler,
    "per_turn": PerTurnAssembler,
}


def build_assembler(name: str, sampling: SamplingParams) -> TurnAssembler:
    if name not in ASSEMBLERS:
        raise RunError(f"no assembler is called {name!r}; there are {', '.join(ASSEMBLERS)}")
    return ASSEMBLERS[name](sampling)
