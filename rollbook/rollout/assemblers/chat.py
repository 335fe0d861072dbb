"""Chat assembly: messages in, token rows out, and sampled text is never tokenised again.

The next prompt is the exact tokens so far plus the tokens of what the template renders *after* the last sampled text. That needs a
template whose rendering of the longer history starts with its rendering of the shorter one. Some do not (they drop earlier
reasoning, say): then the history was rewritten, which is an error that names the first differing character, or, with
`on_rewrite="fork"`, the start of a further sequence whose prompt is the rewritten history.
"""

from collections.abc import Mapping
from typing import Any, Literal

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TurnMark
from rollbook.rollout.assemblers.assembler import (
    AssemblyError,
    PrefixMismatchError,
    SequenceBuffer,
    build_sample,
    first_difference,
    require_same_sampling,
)
from rollbook.rollout.contract import Message, Tokenizer

EXCERPT = 24
"""Characters shown on either side of a differing position: enough to recognise the place."""


class MessageTrajectoryAssembler:
    """`add_message`s, `next_prompt`, `add_completion`; again until the episode ends; then `build`."""

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, *, on_rewrite: Literal["error", "fork"] = "error"
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._on_rewrite = on_rewrite
        self._messages: list[Message] = []
        self._buffers = [SequenceBuffer()]
        self._turns: list[TurnMark] = []
        self._rendered = ""
        """What the template made of the history when the last prompt was built."""
        self._answer: str | None = None
        """The text sampled after that prompt, until the next prompt is built."""
        self._answer_end: int | None = None
        """The end token that was sampled with it, if one was."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens so far of the sequence that grows."""
        return list(self._buffers[-1].token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._buffers[-1])

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        return len(self._buffers) - 1

    def add_message(self, role: str, content: str, **more: Any) -> None:
        """A message the policy did not sample. What it sampled comes in by `add_completion`."""
        self._messages.append({"role": role, "content": content, **more})

    def next_prompt(self) -> list[int]:
        """Render what was added since the last turn onto the exact tokens so far."""
        if not self._messages:
            raise AssemblyError("next_prompt without a message: add one first")
        text = self._tokenizer.render(self._messages, add_generation_prompt=True)
        try:
            suffix = self._suffix(text)
        except PrefixMismatchError:
            if self._on_rewrite == "error":
                raise
            self._fork()
            suffix = text
        buffer = self._buffers[-1]
        buffer.add_context(self._tokenizer.encode(suffix))
        if not len(buffer):
            raise AssemblyError("the rendered prompt is empty: nothing would predict the first sampled token")
        self._rendered, self._answer, self._answer_end = text, None, None
        return list(buffer.token_ids)

    def add_completion(
        self, completion: Completion, *, sampling: SamplingParams | None = None, seconds: float = 0.0
    ) -> str:
        """Add what was sampled after `next_prompt`; returns its text, which is also the assistant's message."""
        if not self._rendered or self._answer is not None:
            raise AssemblyError("add_completion without a prompt of its own: call next_prompt before each turn")
        ids = completion.token_ids.tolist()
        if not ids:
            raise AssemblyError(f"turn {len(self._turns) + 1} is an empty completion ({completion.finish_reason})")
        if sampling is not None:
            require_same_sampling(self._sampling, sampling)
        buffer = self._buffers[-1]
        start = len(buffer)
        buffer.add_sampled(completion)
        self._turns.append(TurnMark(sequence=len(self._buffers) - 1, start=start, end=len(buffer), seconds=seconds))
        self._answer_end = ids[-1] if ids[-1] in self._tokenizer.eos_token_ids else None
        self._answer = self._tokenizer.decode(ids)
        self._messages.append({"role": "assistant", "content": self._answer})
        return self._answer

    def build(
        self,
        *,
        reward: float | None,
        finish_reason: EndReason = EndReason.DONE,
        invalid_cause: str | None = None,
        solved: bool | None = None,
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
            messages=self._messages,
            metrics=metrics,
            facts=facts,
        )

    def _fork(self) -> None:
        """Begin a further sequence; in place of the last one if nothing was sampled in that."""
        if self._turns and self._turns[-1].sequence == len(self._buffers) - 1:
            self._buffers.append(SequenceBuffer())
        else:
            self._buffers[-1] = SequenceBuffer()

    def _suffix(self, text: str) -> str:
        """What `text` renders beyond the tokens so far."""
        if not text.startswith(self._rendered):
            raise self._rewritten(text)
        rest = text[len(self._rendered) :]
        if self._answer is None:
            return rest
        tail = _after(rest, self._answer)
        if tail is None:
            raise self._rewritten(text)
        if self._answer_end is not None:
            # The end token was sampled, so the template's own one is already among the tokens.
            tail = tail.removeprefix(self._tokenizer.decode([self._answer_end], skip_special_tokens=False))
        return tail

    def _rewritten(self, text: str) -> PrefixMismatchError:
        expected = self._rendered + (self._answer or "")
        at = first_difference(expected, text)
        at = min(len(expected), len(text)) if at is None else at
        return PrefixMismatchError(
            f"the template rewrote the history before turn {len(self._turns) + 1}: at character {at} it renders "
            f"{_excerpt(text, at)!r} where the tokens so far have {_excerpt(expected, at)!r}. "
            f'Use a template that keeps earlier turns as they were, or on_rewrite="fork"',
            at,
        )


def _after(rest: str, answer: str) -> str | None:
    """What follows the sampled text. Templates trim or pad it; the tokens stay as sampled, so white space is no rewrite."""
    for text, said in ((rest, answer), (rest.lstrip(), answer.strip())):
        if text.startswith(said):
            return text[len(said) :]
    return None


def _excerpt(text: str, at: int) -> str:
    return text[max(0, at - EXCERPT) : at + EXCERPT]
