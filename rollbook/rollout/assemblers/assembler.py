"""From turns to token rows: the part that all assemblers share.

Invariant: the token ids of a sample are exactly those that the engine consumed and produced. An assembler only appends, so sampled
text is never tokenised again. A prompt that does not continue the tokens so far is an error, or starts a new sequence.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import msgspec
import numpy as np

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import NOT_SAMPLED, Completion, Routes, SamplingParams, is_cut, with_length
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark


class AssemblyError(EpisodeError):
    """These turns do not form a trajectory."""


class PrefixMismatchError(AssemblyError):
    """A prompt does not start with the tokens (or the text) so far. `position` is the first difference."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.position))


Thought: TypeAlias = tuple[Completion, Sequence[int]]
"""The first part of a turn, and tokens that were written after it: the policy read them, but did not sample them."""


class SampleFields(TypedDict, total=False):
    """Fields of a `RolloutSample` that an assembler passes on unchanged."""

    invalid_cause: str | None
    solved: bool | None


class SequenceBuffer:
    """One growing sequence. Token ids are a list, because they are the next prompt; the rest stays in the completions' arrays."""

    __slots__ = ("_routes", "_sampled", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._routes: Routes | None = None
        """The experts chosen for the tokens so far. Each completion has those of its whole prompt, so the last one has all."""
        self._sampled: list[tuple[int, Completion]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads but did not sample."""
        self.token_ids.extend(ids)

    def add_sampled(self, completion: Completion) -> None:
        if completion.routes is not None:
            self._routes = completion.routes
            completion = msgspec.structs.replace(completion, routes=None)
        self._sampled.append((len(self.token_ids), completion))
        self.token_ids.extend(completion.token_ids.tolist())

    def row(self, end: int, *, is_trained: bool = True) -> TokenRow:
        """The first `end` tokens, which include all sampled ones."""
        logprobs, loss_mask = np.zeros(end, dtype=np.float32), np.zeros(end, dtype=np.bool_)
        versions = np.full(end, NOT_SAMPLED, dtype=np.int32)
        for start, completion in self._sampled:
            sampled = slice(start, start + len(completion.token_ids))
            logprobs[sampled] = completion.logprobs
            versions[sampled] = completion.versions
            loss_mask[sampled] = is_trained
        token_ids = np.array(self.token_ids[:end], dtype=np.int32)
        columns = {} if self._routes is None else {"routes": with_length(self._routes, end)}
        return TokenRow(token_ids=token_ids, logprobs=logprobs, loss_mask=loss_mask, versions=versions, columns=columns)


class Assembler:
    """The sequences and turns of one episode. Subclasses decide to which sequence a turn belongs."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._buffers = [SequenceBuffer()]
        self._current = 0
        """Index of the sequence that grew last."""
        self._turns: list[TurnMark] = []
        self.untrained: Collection[int] = ()
        """Sequences that are stored with their logprobs and versions, but not trained."""
        self._is_cut = False
        """The last turn was cut at a limit of tokens."""

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens so far of the sequence that grew last."""
        return list(self._buffers[self._current].token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._buffers[self._current])

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        return len(self._buffers) - 1

    def build(
        self,
        *,
        reward: float | None,
        finish_reason: EndReason | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        **fields: Unpack[SampleFields],
    ) -> RolloutSample:
        """The sample. `finish_reason` None: `max_tokens` if the last turn was cut, otherwise `done`."""
        if finish_reason is None:
            finish_reason = EndReason.MAX_TOKENS if self._is_cut else EndReason.DONE
        if not any(map(len, self._buffers)):
            raise AssemblyError("nothing was assembled: add a prompt and a completion before build()")
        if reward is not None and not self._turns:
            raise AssemblyError(f"reward {reward} for an episode without a turn: there is nothing to train")
        # Context after the last turn of a sequence was never sent to the engine (a limit ended the episode), so it is left out.
        ends = {turn.sequence: turn.end for turn in self._turns} or {0: len(self._buffers[0])}
        return RolloutSample(
            sequences=tuple(
                self._buffers[sequence].row(end, is_trained=sequence not in self.untrained)
                for sequence, end in ends.items()
            ),
            sampling=self._sampling,
            reward=reward,
            finish_reason=finish_reason,
            messages=None if messages is None else tuple(dict(message) for message in messages),
            turns=tuple(self._turns),
            metrics=dict(metrics or {}),
            facts=dict(facts or {}),
            **fields,
        )

    def _check(self, completion: Completion, sampling: SamplingParams | None) -> None:
        if not len(completion.token_ids):
            raise AssemblyError(f"turn {len(self._turns) + 1} is an empty completion ({completion.finish_reason})")
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)

    def _fork(self) -> int:
        """Start a new sequence, or reuse the last one if it has no turn; returns its index."""
        if any(turn.sequence == len(self._buffers) - 1 for turn in self._turns):
            self._buffers.append(SequenceBuffer())
        else:
            self._buffers[-1] = SequenceBuffer()
        return len(self._buffers) - 1

    def _append(self, completion: Completion, seconds: float, thought: Thought | None = None) -> TurnMark:
        buffer = self._buffers[self._current]
        start = len(buffer)
        if thought is not None:
            buffer.add_sampled(thought[0])
            buffer.add_context(thought[1])
        buffer.add_sampled(completion)
        self._is_cut = is_cut(completion, self._sampling)
        self._turns.append(TurnMark(sequence=self._current, start=start, end=len(buffer), seconds=seconds))
        return self._turns[-1]


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first position below both lengths at which the two differ."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def after_sampled_end(text: str, end_text: str) -> str:
    """The template's text after a reply whose end token was sampled, so the one that the template adds is left out.

    Templates may write white space before it. `end_text` is empty if no end token was sampled.
    """
    if end_text and text.lstrip().startswith(end_text):
        return text.lstrip().removeprefix(end_text)
    return text


def require_same_sampling(expected: SamplingParams, other: SamplingParams) -> None:
    """A sample has one sampling distribution, because the trainer computes its logprobs at one temperature."""
    for name in ("temperature", "top_p", "top_k"):
        if getattr(expected, name) != getattr(other, name):
            raise AssemblyError(
                f"a turn was sampled with {name} {getattr(other, name)}, the others with {getattr(expected, name)}: "
                f"all trained turns of a sample need the same sampling settings"
            )
