"""Parsers that split sampled text into content and tool calls, one per format that models write."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollbook.contracts.decoding import load_json
from rollbook.contracts.output_formats import ToolCall, parse_call, parse_tool_calls
from rollbook.contracts.plugin import PluginError, load_plugin


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Sampled text, split into content and tool calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    def is_same_as(self, other: "ParsedText") -> bool:
        """Ignores white space around the content and the layout of JSON arguments."""
        mine, theirs = (
            [(call.name, canonical_arguments(call.arguments)) for call in parsed.calls] for parsed in (self, other)
        )
        return self.content.strip() == other.content.strip() and mine == theirs

    def to_message(self) -> dict[str, Any]:
        """The assistant message, as agents send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [call.to_openai() for call in self.calls]
        return message


ToolParser: TypeAlias = Callable[[str], ParsedText]


def canonical_arguments(text: str) -> str:
    """JSON with sorted keys and one layout; other text unchanged."""
    try:
        return json.dumps(load_json(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


def parse_hermes(text: str) -> ParsedText:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Qwen, Hermes and others."""
    content, calls = parse_tool_calls(text)
    return ParsedText(content.strip() if calls else content, tuple(calls))


def parse_json(text: str) -> ParsedText:
    """The whole text is one call, `{"name": ..., "parameters": {...}}`: Llama 3."""
    call = parse_call(text.strip().removeprefix("<|python_tag|>"))
    return ParsedText(text) if call is None else ParsedText("", (call,))


PARSERS: dict[str, ToolParser] = {"hermes": parse_hermes, "json": parse_json, "none": ParsedText}


def load_parser(name: str) -> ToolParser:
    """A built-in parser, or `module:function` that takes the text and returns a `ParsedText`."""
    if name in PARSERS:
        return PARSERS[name]
    own = load_plugin(name, setting="tool_parser", builtin=dict.fromkeys(PARSERS, __name__))

    def parse(text: str) -> ParsedText:
        parsed = own(text)
        if not isinstance(parsed, ParsedText):
            kind = type(parsed).__name__
            raise PluginError(f"tool_parser = {name!r} returned a {kind}; it must return a rollbook.ParsedText")
        return parsed

    return parse
