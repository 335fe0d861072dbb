"""Assemblers that take tokens: one growing sequence, a new sequence for each rewritten history, or one for each turn."""

from collections.abc import Sequence

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import TurnMark
from rollbook.rollout.assemblers.assembler import Assembler, AssemblyError, PrefixMismatchError, first_difference


class TrajectoryAssembler(Assembler):
    """The history only grows and makes one row: `add_prompt`, then completions and observations in order, then `build`."""

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
    ) -> TurnMark:
        """A whole turn. The prompt must start with the exact tokens so far."""
        _require_prompt(prompt_ids, self.num_turns + 1)
        self._check(completion, sampling)
        self._buffers[0].add_context(self.expect_prefix(prompt_ids))
        return self._append(completion, seconds)

    def add_prompt(self, ids: Sequence[int]) -> None:
        if self.num_tokens:
            raise AssemblyError(
                f"add_prompt after {self.num_tokens} tokens: it starts the sequence; use add_observation for later tokens"
            )
        if not ids:
            raise AssemblyError("the prompt is empty: nothing would predict the first sampled token")
        self._buffers[0].add_context(ids)

    def add_completion(
        self, completion: Completion, *, sampling: SamplingParams | None = None, seconds: float = 0.0
    ) -> None:
        """Tokens sampled after `prompt_ids`. `sampling`: their parameters, if not those of the assembler."""
        if not self.num_tokens:
            raise AssemblyError("add_completion before add_prompt: nothing would predict the first sampled token")
        self._check(completion, sampling)
        self._append(completion, seconds)

    def add_observation(self, ids: Sequence[int]) -> None:
        """Tokens of the environment: read by the policy, never trained."""
        if not self.num_tokens:
            raise AssemblyError("add_observation before add_prompt: start the sequence with the prompt")
        self._buffers[0].add_context(ids)

    def expect_prefix(self, ids: Sequence[int]) -> list[int]:
        """Check that a prompt starts with the exact tokens so far; return the rest of it."""
        prompt, so_far = list(map(int, ids)), self._buffers[0].token_ids
        if prompt[: len(so_far)] == so_far:
            return prompt[len(so_far) :]
        at = first_difference(so_far, prompt)
        if at is not None:
            raise PrefixMismatchError(
                f"the prompt does not start with the {len(so_far)} tokens so far: token {prompt[at]} instead of {so_far[at]} "
                f"at position {at}. Sampled text was probably tokenised again: build the prompt from prompt_ids",
                at,
            )
        raise PrefixMismatchError(
            f"the prompt ends at position {len(prompt)}, but the sequence already has {len(so_far)} tokens: "
            "the history was cut; build the prompt from prompt_ids",
            len(prompt),
        )


class BranchingAssembler(Assembler):
    """A prompt continues the longest sequence that it starts with; any other prompt starts a new sequence.

    Sampled tokens that a new sequence repeats are context there, so each one is trained exactly once.
    """

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
    ) -> TurnMark:
        """A whole turn, sampled after exactly `prompt_ids`. The mark says to which sequence it was added."""
        _require_prompt(prompt_ids, self.num_turns + 1)
        self._check(completion, sampling)
        prompt = list(map(int, prompt_ids))
        self._current = self._sequence_of(prompt)
        buffer = self._buffers[self._current]
        buffer.add_context(prompt[len(buffer) :])
        return self._append(completion, seconds)

    def _sequence_of(self, prompt: list[int]) -> int:
        continued = [
            (len(buffer), -number)
            for number, buffer in enumerate(self._buffers)
            if prompt[: len(buffer)] == buffer.token_ids
        ]
        return -max(continued)[1] if continued else self._fork()


class PerTurnAssembler(BranchingAssembler):
    """Each turn is a sequence, its prompt the context. For prompts that are written anew each turn; costs more tokens."""

    def _sequence_of(self, prompt: list[int]) -> int:
        return self._fork()


ASSEMBLERS: dict[str, type[TrajectoryAssembler] | type[BranchingAssembler]] = {
    "linear": TrajectoryAssembler,
    "branching": BranchingAssembler,
    "per_turn": PerTurnAssembler,
}


def build_assembler(name: str, sampling: SamplingParams) -> TrajectoryAssembler | BranchingAssembler:
    if name not in ASSEMBLERS:
        raise RunError(f"there is no assembler {name!r}; choose one of {', '.join(ASSEMBLERS)}")
    return ASSEMBLERS[name](sampling)


def _require_prompt(prompt_ids: Sequence[int], number: int) -> None:
    if not len(prompt_ids):
        raise AssemblyError(f"turn {number} has an empty prompt: nothing would predict the first sampled token")
