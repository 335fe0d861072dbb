"""Token-native assembly of a history that may be rewritten: a prompt continues the sequence it starts with, or begins another.

Nothing is decided by text. A prompt that starts with all tokens of a sequence continues it (the longest, where several fit); any
other prompt is the context of a further sequence. So what was sampled is kept, and trained exactly once: where a fork repeats
tokens that were sampled before, they are context there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TurnMark
from rollbook.rollout.assemblers.assembler import SequenceBuffer, build_sample, require_same_sampling, require_turn


class BranchingAssembler:
    """`add_turn` with what the engine consumed and produced, in any order in which that happened; then `build`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._buffers: list[SequenceBuffer] = []
        self._turns: list[TurnMark] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens so far of the sequence that grew last."""
        return list(self._buffers[self._turns[-1].sequence].token_ids) if self._turns else []

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
        """What was sampled after exactly `prompt_ids`. The mark says which sequence it went into."""
        require_turn(prompt_ids, completion, number=len(self._turns) + 1)
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)
        prompt = list(map(int, prompt_ids))
        sequence = self._continued(prompt)
        if sequence is None:
            sequence = len(self._buffers)
            self._buffers.append(SequenceBuffer())
        buffer = self._buffers[sequence]
        buffer.add_context(prompt[len(buffer) :])
        buffer.add_sampled(completion)
        turn = TurnMark(sequence=sequence, start=len(prompt), end=len(buffer), seconds=seconds)
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

    def _continued(self, prompt: list[int]) -> int | None:
        """The longest sequence that `prompt` starts with."""
        fitting = [
            (len(buffer), -number)
            for number, buffer in enumerate(self._buffers)
            if len(buffer) <= len(prompt) and prompt[: len(buffer)] == buffer.token_ids
        ]
        return -max(fitting)[1] if fitting else None
