"""From turns to token rows: what every assembler shares.

The promise: the token ids of a sample are exactly what the engine consumed and produced. An assembler only ever appends, so sampled
text is never tokenised again; what does not fit onto the tokens so far is an error that names the place, or a further sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import NOT_SAMPLED, Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark


class AssemblyError(EpisodeError):
    """These turns do not make a trajectory."""


class PrefixMismatchError(AssemblyError):
    """A prompt does not start with the tokens (or the text) so far. `position` is the first that differs."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.position))


class Assembler(Protocol):
    """What turns become. `TurnAssembler`s take tokens, `messages.MessageTrajectoryAssembler` chat messages."""

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens so far of the sequence that grows."""

    @property
    def num_turns(self) -> int: ...

    def build(
        self,
        *,
        reward: float | None,
        finish_reason: EndReason = EndReason.DONE,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RolloutSample: ...


class TurnAssembler(Protocol):
    """An assembler that is given whole turns; `assemblers.table` names them. It differs in what it makes of a rewritten history."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def num_turns(self) -> int: ...

    @property
    def num_forks(self) -> int: ...

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
    ) -> TurnMark:
        """What the engine consumed and what it produced. The mark says where it went."""

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
    ) -> RolloutSample: ...


def require_turn(prompt_ids: Sequence[int], completion: Completion, *, number: int) -> None:
    """A turn needs something to answer and an answer."""
    if not len(prompt_ids):
        raise AssemblyError(f"turn {number} has an empty prompt: nothing would predict the first sampled token")
    if not len(completion.token_ids):
        raise AssemblyError(f"turn {number} is an empty completion ({completion.finish_reason})")


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first position below both lengths at which the two differ."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def require_same_sampling(agreed: SamplingParams, other: SamplingParams) -> None:
    """A sample has one sampling distribution: the trainer computes its logprobs at one temperature."""
    for name in ("temperature", "top_p", "top_k"):
        if getattr(agreed, name) != getattr(other, name):
            raise AssemblyError(
                f"a turn was sampled with {name} {getattr(other, name)}, the others with {getattr(agreed, name)}: "
                f"a sample cannot mix them, play every trained turn with the same settings"
            )


class SequenceBuffer:
    """One sequence that grows. Plain lists: a turn of a few tokens costs less this way than with arrays."""

    __slots__ = ("logprobs", "loss_mask", "token_ids", "versions")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[bool] = []
        self.versions: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Tokens the policy read but did not sample."""
        self.token_ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.loss_mask.extend([False] * len(ids))
        self.versions.extend([NOT_SAMPLED] * len(ids))

    def add_sampled(self, completion: Completion) -> None:
        self.token_ids.extend(completion.token_ids.tolist())
        self.logprobs.extend(completion.logprobs.tolist())
        self.loss_mask.extend([True] * len(completion.token_ids))
        self.versions.extend(completion.versions.tolist())

    def row(self, end: int) -> TokenRow:
        return TokenRow.of(
            token_ids=self.token_ids[:end],
            logprobs=self.logprobs[:end],
            loss_mask=self.loss_mask[:end],
            versions=self.versions[:end],
        )


def build_sample(
    buffers: Sequence[SequenceBuffer],
    turns: Sequence[TurnMark],
    sampling: SamplingParams,
    *,
    reward: float | None,
    finish_reason: EndReason,
    invalid_cause: str | None,
    solved: bool | None,
    messages: Sequence[Mapping[str, Any]] | None,
    metrics: Mapping[str, float] | None,
    facts: Mapping[str, Any] | None,
) -> RolloutSample:
    if not any(len(buffer) for buffer in buffers):
        raise AssemblyError("nothing was assembled: add a prompt and a completion before build()")
    if reward is not None and not turns:
        raise AssemblyError(f"reward {reward} for an episode without a turn: nothing could be learned from it")
    # Context after a sequence's last turn was never sent to the engine (a limit ended the episode): it is not part of the record.
    ends = {turn.sequence: turn.end for turn in turns} or {0: len(buffers[0])}
    return RolloutSample(
        sequences=tuple(buffers[sequence].row(end) for sequence, end in ends.items()),
        sampling=sampling,
        reward=reward,
        finish_reason=finish_reason,
        invalid_cause=invalid_cause,
        solved=solved,
        messages=None if messages is None else tuple(dict(message) for message in messages),
        metrics=dict(metrics or {}),
        turns=tuple(turns),
        facts=dict(facts or {}),
    )
