"""Turns a chat request into a prompt: the exact tokens of the turn it continues, plus the template's text after that turn.

A turn is recognised by the messages up to its reply. If the template renders the longer history with the reply unchanged, the next
prompt is the tokens of that turn, as consumed and sampled, plus the tokens of the rest. Otherwise (a template that drops earlier
reasoning, an agent that edits its history) the prompt is rendered from the messages, and the assembler starts a new sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollbook.rollout.agents.messages import digests
from rollbook.rollout.agents.tool_calls import THINKING_TAGS, ParsedText, ToolParser
from rollbook.rollout.assemblers.assembler import after_sampled_end, first_difference
from rollbook.rollout.contract import Message, RenderError, Tokenizer

REPLY_MARK = "\u2063rollbook\u2063answer\u2063"
"""Replaces a reply to find out what the template writes around it. Does not occur in real text."""
EXCERPT_CHARS = 24

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    tokens: list[int]
    """Tokens the engine consumed and produced."""
    rendered: str
    """The template's text for the messages before the reply."""
    reply: str
    """The sampled text, tool calls included."""
    end_text: str
    """The text of the sampled end token; empty if there was none."""
    prompt: str = ""
    """What the reply follows, for its parser. Empty: it begins with no thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    rendered: str
    rewrite: str | None = None
    """Why the prompt does not continue the tokens of the recognised turn; None if it does, or if no turn was recognised."""
    is_continued: bool = False


class ChatHistory:
    """The turns of one session, recognised by their messages."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._turns: dict[bytes, PlayedTurn] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools, template: Mapping[str, Any] | None = None) -> Prompt:
        """`template` are further arguments of the chat template."""
        render = partial(self._tokenizer.render, add_generation_prompt=True, tools=tools, template=template)
        text = render(messages)
        found = self._find(messages, tools)
        if found is None:
            return Prompt(token_ids=self._tokenizer.encode(text), rendered=text)
        count, turn = found
        rest = self._rest(turn, messages, count, render, tools)
        if rest is None:
            return Prompt(token_ids=self._tokenizer.encode(text), rendered=text, rewrite=_difference(turn, text))
        return Prompt(token_ids=turn.tokens + self._tokenizer.encode(rest), rendered=text, is_continued=True)

    def add(self, messages: Sequence[Message], tools: Tools, turn: PlayedTurn) -> None:
        """`messages` end with the reply, in the form in which the agent will send it back."""
        self._turns[digests(messages, tools)[-1]] = turn

    def _find(self, messages: Sequence[Message], tools: Tools) -> tuple[int, PlayedTurn] | None:
        """The longest prefix of the messages that ends with a reply of this session."""
        prefixes = digests(messages, tools)
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] == "assistant" and (turn := self._turns.get(prefixes[count - 1])):
                return count, turn
        return None

    def _rest(
        self,
        turn: PlayedTurn,
        messages: Sequence[Message],
        count: int,
        render: Callable[[Sequence[Message]], str],
        tools: Tools,
    ) -> str | None:
        """The template's text after the reply of `turn`; None if the template changes the reply."""
        text = render(messages)
        # Without its thought, a template would print an empty one before the mark.
        thought = _continued_thought(turn)
        prompt = "" if thought else turn.prompt
        parse: Callable[[str], ParsedText] = partial(self._parser, tools=tools, prompt=prompt) if tools else ParsedText
        marked = [*messages[: count - 1], {"role": "assistant", "content": thought + REPLY_MARK}, *messages[count:]]
        try:
            around = render(marked)
        except RenderError:
            # A template that requires a call before its result: compare the whole text instead.
            return self._rest_of_text(turn, text)
        before, found, rest = around.partition(REPLY_MARK)
        if not found or before.rstrip() != (turn.rendered + thought).rstrip():
            return None
        if len(text) < len(before) + len(rest) or not (text.startswith(before) and text.endswith(rest)):
            return None
        kept = text[len(before) : len(text) - len(rest)]
        return (
            after_sampled_end(rest, turn.end_text)
            if parse(kept).is_same_as(parse(turn.reply[len(thought) :]))
            else None
        )

    def _rest_of_text(self, turn: PlayedTurn, text: str) -> str | None:
        whole = turn.rendered + turn.reply
        return after_sampled_end(text[len(whole) :], turn.end_text) if text.startswith(whole) else None


def _continued_thought(turn: PlayedTurn) -> str:
    """The part of the reply that ends a thought of the prompt; empty if the prompt does not end in one."""
    opening, closing = THINKING_TAGS
    if not turn.rendered.rstrip().endswith(opening) or closing not in turn.reply:
        return ""
    thought, _, answer = turn.reply.partition(closing)
    return thought + closing + answer[: len(answer) - len(answer.lstrip())]


def _difference(turn: PlayedTurn, text: str) -> str:
    whole = turn.rendered + turn.reply
    at = first_difference(whole, text)
    at = min(len(whole), len(text)) if at is None else at
    there, here = (part[max(0, at - EXCERPT_CHARS) : at + EXCERPT_CHARS] for part in (text, whole))
    return f"at character {at} the template renders {there!r} where the tokens so far have {here!r}"
