"""Assembler that takes chat messages. Sampled text is never tokenised again.

The next prompt is the exact tokens so far plus the tokens of the text that the template renders after the last sampled text. This
requires a template whose rendering of a longer history starts with its rendering of the shorter one. Some templates rewrite earlier
turns (for example, they drop reasoning). Then the assembler raises an error that names the first differing character, or starts a
new sequence with the rewritten history as its prompt (`on_rewrite="fork"`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import CHAT_FACT, EndReason, RolloutSample
from rollbook.rollout.assemblers.assembler import (
    Assembler,
    AssemblyError,
    PrefixMismatchError,
    SampleFields,
    Thought,
    after_sampled_end,
    first_difference,
)
from rollbook.rollout.contract import Message, Tokenizer

EXCERPT_CHARS = 24
"""Characters shown on either side of the first difference in error messages."""


class MessageTrajectoryAssembler(Assembler):
    """`add_message`s, `next_prompt`, `add_completion`; repeated until the episode ends; then `build`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        on_rewrite: Literal["error", "fork"] = "error",
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools` and the arguments in `template` are passed to the chat template."""
        super().__init__(sampling)
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        self._template = dict(template or {})
        self._on_rewrite = on_rewrite
        self._messages: list[Message] = []
        self._rendered = ""
        """The rendered history when the last prompt was built."""
        self._sampled: str | None = None
        """The text sampled after that prompt, until the next prompt is built."""
        self._sampled_end: int | None = None
        """The end token sampled with it, if any."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def prompt_text(self) -> str:
        """The rendering that the last sampled text followed."""
        return self._rendered

    def add_message(self, role: str, content: str, **more: Any) -> None:
        """Add a message that the policy did not sample; sampled ones are added by `add_completion`."""
        self._messages.append({"role": role, "content": content, **more})

    def next_prompt(self) -> list[int]:
        """Append the rendering of the new messages to the exact tokens so far."""
        if not self._messages:
            raise AssemblyError("next_prompt without a message: add one first")
        text = self._tokenizer.render(
            self._messages, add_generation_prompt=True, tools=self._tools, template=self._template
        )
        try:
            suffix = self._suffix(text)
        except PrefixMismatchError:
            if self._on_rewrite == "error":
                raise
            self._current = self._fork()
            suffix = text
        buffer = self._buffers[self._current]
        buffer.add_context(self._tokenizer.encode(suffix))
        if not len(buffer):
            raise AssemblyError("the rendered prompt is empty: nothing would predict the first sampled token")
        self._rendered, self._sampled, self._sampled_end = text, None, None
        return self.prompt_ids

    def add_completion(
        self,
        completion: Completion,
        *,
        sampling: SamplingParams | None = None,
        seconds: float = 0.0,
        thought: Thought | None = None,
    ) -> str:
        """Add the tokens sampled after `next_prompt`; returns their text, which is also the assistant's message.

        `thought`: what the policy sampled before it in the same turn.
        """
        if not self._rendered or self._sampled is not None:
            raise AssemblyError("add_completion without a prompt: call next_prompt before each turn")
        self._check(completion, sampling)
        turn = self._append(completion, seconds, thought)
        ids = self._buffers[turn.sequence].token_ids[turn.start : turn.end]
        self._sampled_end = ids[-1] if ids[-1] in self._tokenizer.eos_token_ids else None
        self._sampled = self._tokenizer.decode(ids)
        self._messages.append({"role": "assistant", "content": self._sampled})
        return self._sampled

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
        messages = self._messages if messages is None else messages
        if chat := chat_fact(self._tools, self._template):
            facts = {**(facts or {}), CHAT_FACT: chat}
        return super().build(
            reward=reward, finish_reason=finish_reason, messages=messages, metrics=metrics, facts=facts, **fields
        )

    def _suffix(self, text: str) -> str:
        """The part of `text` after the tokens so far."""
        if not text.startswith(self._rendered):
            raise self._rewritten(text)
        rest = text[len(self._rendered) :]
        if self._sampled is None:
            return rest
        tail = _after(rest, self._sampled)
        if tail is None:
            raise self._rewritten(text)
        if self._sampled_end is None:
            return tail
        return after_sampled_end(tail, self._tokenizer.decode([self._sampled_end], skip_special_tokens=False))

    def _rewritten(self, text: str) -> PrefixMismatchError:
        expected = self._rendered + (self._sampled or "")
        at = first_difference(expected, text)
        at = min(len(expected), len(text)) if at is None else at
        return PrefixMismatchError(
            f"the template rewrote the history before turn {self.num_turns + 1}: at character {at} it renders "
            f"{_excerpt(text, at)!r} where the tokens so far have {_excerpt(expected, at)!r}. "
            f'Use a template that keeps earlier turns unchanged, or on_rewrite="fork"',
            at,
        )


def chat_fact(tools: Sequence[Mapping[str, Any]] | None, template: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the chat template got besides the messages; empty if there is nothing."""
    given = {"tools": list(tools or ()), "template": dict(template or {})}
    return {name: value for name, value in given.items() if value}


def _after(rest: str, sampled: str) -> str | None:
    """The text after the sampled one. Templates trim or pad it; the tokens stay as sampled, so white space may differ."""
    for text, prefix in ((rest, sampled), (rest.lstrip(), sampled.strip())):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return None


def _excerpt(text: str, at: int) -> str:
    return text[max(0, at - EXCERPT_CHARS) : at + EXCERPT_CHARS]
