"""Token-native assembly for histories that never repeat: each turn is a row of its own, its prompt the context.

Right where every prompt is written anew (a template that drops earlier reasoning, an agent that summarises). It costs tokens: what
turns share is stored and computed once for each of them. `branching` shares what can be shared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TurnMark
from rollbook.rollout.assembly import SequenceBuffer, build_sample, require_same_sampling, require_turn


class PerTurnAssembler:
    """`add_turn` with what the engine consumed and produced; then `build`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._buffers: list[SequenceBuffer] = []
        self._turns: list[TurnMark] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the last turn, its prompt included."""
        return list(self._buffers[-1].token_ids) if self._buffers else []

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        return max(0, len(self._buffers) - 1)

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
    ) -> TurnMark:
        require_turn(prompt_ids, completion, number=len(self._turns) + 1)
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)
        buffer = SequenceBuffer()
        buffer.add_context(list(map(int, prompt_ids)))
        start = len(buffer)
        buffer.add_sampled(completion)
        turn = TurnMark(sequence=len(self._buffers), start=start, end=len(buffer), seconds=seconds)
        self._buffers.append(buffer)
        self._turns.append(turn)
        return turn

    def build(
        self,
        *,
        reward: float | None,
        finish_reason: EndReason = EndReason.DONE,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RolloutSample:
        return build_sample(
            self._buffers,
            self._turns,
            self._sampling,
            reward=reward,
            finish_reason=finish_reason,
            invalid_cause=invalid_cause,
            solved=solved,
            messages=messages,
            metrics=metrics,
            facts=facts,
        )
