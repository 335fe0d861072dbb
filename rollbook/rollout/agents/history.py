"""Which prompt a chat request becomes: the exact tokens of the turn it continues, and what the template renders after them.

A turn is recognised by the messages up to its answer. Where the template renders the longer history so that it says what the policy
said, the next prompt is the tokens of that turn, as consumed and sampled, plus those of the rest. Where it does not (a template
that drops earlier reasoning, an agent that edits its history) the prompt is rendered anew, which the assembler makes a fork of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.rollout.agents.messages import digests
from rollbook.rollout.agents.tool_calls import ParsedText, ToolParser
from rollbook.rollout.assemblers.assembler import first_difference
from rollbook.rollout.chat.tokenizer import RenderError
from rollbook.rollout.contract import Message, Tokenizer

PLACE = "\u2063rollbook\u2063answer\u2063"
"""Stands for an answer where only what the template writes around it is of interest. Nobody says it."""
EXCERPT = 24

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A turn that was played."""

    tokens: list[int]
    """What the engine consumed, then what it produced."""
    rendered: str
    """What the template made of the messages before the answer."""
    said: str
    """The text of the answer, as the agent got it before tool calls were taken out."""
    end_text: str
    """The text of the end token that was sampled with it; empty if none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    rendered: str
    rewrite: str | None = None
    """Why this does not continue the turn that its messages continue; None when it does, or when it continues none."""
    is_continued: bool = False


class ChatHistory:
    """The turns of one session, found again by what was said."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._answered: dict[bytes, Answered] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        text = self._tokenizer.render(messages, add_generation_prompt=True, tools=tools)
        found = self._find(messages, tools)
        if found is None:
            return Prompt(token_ids=self._tokenizer.encode(text), rendered=text)
        count, turn = found
        rest = self._rest(turn, messages, count, tools, text)
        if rest is None:
            return Prompt(token_ids=self._tokenizer.encode(text), rendered=text, rewrite=_difference(turn, text))
        return Prompt(token_ids=turn.tokens + self._tokenizer.encode(rest), rendered=text, is_continued=True)

    def add(self, messages: Sequence[Message], tools: Tools, turn: Answered) -> None:
        """`messages` end with the answer, in the form in which the agent will send it back."""
        self._answered[digests(messages, tools)[-1]] = turn

    def _find(self, messages: Sequence[Message], tools: Tools) -> tuple[int, Answered] | None:
        """The longest prefix of the messages that ends with an answer of ours."""
        prefixes = digests(messages, tools)
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] == "assistant" and (turn := self._answered.get(prefixes[count - 1])):
                return count, turn
        return None

    def _rest(self, turn: Answered, messages: Sequence[Message], count: int, tools: Tools, text: str) -> str | None:
        """What the template writes after the answer of `turn`; None when it does not keep what was said."""
        marked = [*messages[: count - 1], {"role": "assistant", "content": PLACE}, *messages[count:]]
        try:
            around = self._tokenizer.render(marked, add_generation_prompt=True, tools=tools)
        except RenderError:
            # A template that wants a call before its result: then only the whole text can tell.
            return self._rest_of_text(turn, text)
        before, found, rest = around.partition(PLACE)
        if not found or before.rstrip() != turn.rendered.rstrip():
            return None
        if len(text) < len(before) + len(rest) or not (text.startswith(before) and text.endswith(rest)):
            return None
        parse = self._parser if tools else ParsedText
        kept = text[len(before) : len(text) - len(rest)]
        return self._after_end(turn, rest) if parse(kept).is_same_as(parse(turn.said)) else None

    def _rest_of_text(self, turn: Answered, text: str) -> str | None:
        whole = turn.rendered + turn.said
        return self._after_end(turn, text[len(whole) :]) if text.startswith(whole) else None

    def _after_end(self, turn: Answered, rest: str) -> str:
        """The end token was sampled, so the template's own one is already among the tokens."""
        if turn.end_text and rest.lstrip().startswith(turn.end_text):
            rest = rest.lstrip()
        return rest.removeprefix(turn.end_text)


def _difference(turn: Answered, text: str) -> str:
    whole = turn.rendered + turn.said
    at = first_difference(whole, text)
    at = min(len(whole), len(text)) if at is None else at
    there, here = (part[max(0, at - EXCERPT) : at + EXCERPT] for part in (text, whole))
    return f"at character {at} the template renders {there!r} where the tokens so far have {here!r}"
