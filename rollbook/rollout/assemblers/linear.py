"""Token-native assembly: the history only grows, and makes one row."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TurnMark
from rollbook.rollout.assemblers.assembler import (
    AssemblyError,
    PrefixMismatchError,
    SequenceBuffer,
    build_sample,
    first_difference,
    require_same_sampling,
    require_turn,
)


class TrajectoryAssembler:
    """`add_prompt`, then completions and observations in the order they happened, then `build`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._buffer = SequenceBuffer()
        self._turns: list[TurnMark] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens so far: the prompt of the next turn."""
        return list(self._buffer.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._buffer)

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        """None: what does not continue the tokens so far is refused here."""
        return 0

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
    ) -> TurnMark:
        """A whole turn: the prompt somebody else built, which must start with the exact tokens so far, and the answer to it."""
        require_turn(prompt_ids, completion, number=len(self._turns) + 1)
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)
        self._buffer.add_context(self.expect_prefix(list(map(int, prompt_ids))))
        self.add_completion(completion, seconds=seconds)
        return self._turns[-1]

    def add_prompt(self, ids: Sequence[int]) -> None:
        if len(self._buffer):
            raise AssemblyError(
                f"add_prompt after {len(self._buffer)} tokens: it opens the sequence, what follows is an observation"
            )
        if not ids:
            raise AssemblyError("the prompt is empty: nothing would predict the first sampled token")
        self._buffer.add_context(ids)

    def add_completion(
        self, completion: Completion, *, sampling: SamplingParams | None = None, seconds: float = 0.0
    ) -> None:
        """Tokens the policy sampled as an answer to `prompt_ids`. `sampling`: how, where it was not the assembler's own."""
        if not len(self._buffer):
            raise AssemblyError("add_completion before add_prompt: nothing would predict the first sampled token")
        if not len(completion.token_ids):
            raise AssemblyError(f"turn {len(self._turns) + 1} is an empty completion ({completion.finish_reason})")
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)
        start = len(self._buffer)
        self._buffer.add_sampled(completion)
        self._turns.append(TurnMark(sequence=0, start=start, end=len(self._buffer), seconds=seconds))

    def add_observation(self, ids: Sequence[int]) -> None:
        """Tokens the world answered; read by the policy, never trained."""
        if not len(self._buffer):
            raise AssemblyError("add_observation before add_prompt: open the sequence with the prompt")
        self._buffer.add_context(ids)

    def expect_prefix(self, ids: Sequence[int]) -> list[int]:
        """Check that a prompt someone else rendered starts with the exact tokens so far; give what comes after them."""
        so_far = self._buffer.token_ids
        at = first_difference(so_far, ids)
        if at is not None:
            raise PrefixMismatchError(
                f"the prompt does not start with the {len(so_far)} tokens so far: at position {at} it has token {ids[at]} "
                f"where {so_far[at]} stands. Sampled text was probably tokenised again: build the prompt from prompt_ids",
                at,
            )
        if len(ids) < len(so_far):
            raise PrefixMismatchError(
                f"the prompt ends at position {len(ids)}, but the sequence already has {len(so_far)} tokens "
                f"(there: {so_far[len(ids)]}). History was cut: build the prompt from prompt_ids",
                len(ids),
            )
        return list(ids[len(so_far) :])

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
            [self._buffer],
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
