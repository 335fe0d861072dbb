"""Formats of sampled text that agents require: tool calls in the Hermes format, JSON of a schema, and text in parts.

Tool calls are parsed from text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Text that is not a valid call stays
text, so the agent and the reward function see what the policy wrote. Grammars restrict sampling to a format; they are text in the
Lark dialect of llguidance. The policy server and the proxy write them; the policy server compiles them.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text, as in OpenAI's API."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its valid calls, and those calls in order."""
    calls: list[ToolCall] = []

    def remove(block: re.Match[str]) -> str:
        call = parse_call(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    return _BLOCK.sub(remove, text), calls


def parse_call(text: str) -> ToolCall | None:
    """One call as JSON: `name`, and `arguments` or `parameters` as an object or as JSON text. None for anything else."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["name"], arguments) if isinstance(arguments, str) else None


# Grammars

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout that chat templates write. A free layout would let a weak policy write blanks without end."""


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema; without one, any JSON object."""
    return f"start: {_json_rule(schema if schema is not None else {'type': 'object'})}\n"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(map(_literal, choices)) + "\n"


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], *, form: str = "hermes", is_single: bool = False) -> str:
    """One call or more of these tools, in OpenAI's format of tools. `form` is the format of calls: `hermes` or `json`.

    Raises `ValueError` for a form that has no grammar.
    """
    arguments = {"hermes": "arguments", "json": "parameters"}.get(form)
    if arguments is None:
        raise ValueError(f"calls in the format {form!r} have no grammar; use hermes or json")
    functions = [tool["function"] for tool in tools]
    names = [json.dumps(function["name"], ensure_ascii=False) for function in functions]
    lines = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        opening = _literal(f'{{"name": {names[at]}, "{arguments}": ')
        lines += [f'call_{at}: {opening} arguments_{at} "}}"']
        lines += [f"arguments_{at}: {_json_rule(function.get('parameters') or {'type': 'object'})}"]
    if form == "json":
        start = "start: call"
    else:
        block = r'"<tool_call>\n" call "\n</tool_call>"'
        start = f"start: {block}" if is_single else f'start: block ("\\n" block)*\nblock: {block}'
    return "\n".join([start, *lines]) + "\n"


def forced_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> list[Mapping[str, Any]]:
    """The tools of which one must be called, by OpenAI's `tool_choice`; empty if the policy decides. Raises `ValueError`."""
    if tool_choice in (None, "auto", "none"):
        return []
    known = list(tools or ())
    if not known:
        raise ValueError(f"tool_choice: {tool_choice!r} requires tools")
    for at, tool in enumerate(known):
        described = tool.get("function")
        if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
            raise ValueError(f"tools: number {at} is not a function with a name")
        if not isinstance(described.get("parameters") or {}, Mapping):
            raise ValueError(f"tools: the parameters of {described['name']!r} are not a JSON schema")
    if tool_choice == "required":
        return known
    function = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice: {tool_choice!r} is not auto, none, required or a function with a name")
    named = [tool for tool in known if tool["function"]["name"] == name]
    if not named:
        raise ValueError(f"tool_choice: {name!r} is not among the tools")
    return named


def response_format_grammar(response_format: Any) -> str | None:
    """The grammar of OpenAI's `response_format`; None for plain text. Raises `ValueError`."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar()
    # The Responses API has the schema directly in the format.
    described = response_format.get("json_schema", response_format) if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError("response_format: the type must be text, json_object, or json_schema with a schema")
    return json_grammar(schema)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": LAYOUT}, ensure_ascii=False)


def _literal(text: str) -> str:
    """A text in a Lark grammar. JSON escapes it the same way."""
    return json.dumps(text, ensure_ascii=False)


# Text as it is sampled

REPLACEMENT = "\ufffd"
"""Decoders write it for bytes that do not form a complete character (yet)."""


class IncrementalDecoder:
    """Decodes tokens as they arrive. All returned parts together equal the text decoded at once; no part splits a character.

    A character may span several tokens, and a tokenizer may decode the first token of a text differently. So a short window
    before the new tokens is decoded with them, and only the added text is returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_start = 0
        self._window_end = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. Empty while a character is incomplete."""
        self._ids.extend(token_ids)
        return self._advance(is_last=False)

    def finish(self) -> str:
        """The remaining bytes, which never became a character."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._window_start : self._window_end])
        now = self._decode(self._ids[self._window_start :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not is_last):
            return ""
        self._window_start, self._window_end = self._window_end, len(self._ids)
        return now[len(before) :]


class StopStrings:
    """Finds stop strings in text that arrives in parts, and returns the text before them.

    Text that may be the start of a stop string is held back. The result does not depend on how the text is split. Of several
    stop strings, the first complete one ends the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""
        """The text from the start of the match on."""

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        self._held += text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if matches:
            _, split, self.matched = min(matches)
        else:
            split = len(self._held) - self._length_to_hold()
        certain, self._held = self._held[:split], self._held[split:]
        if matches:
            self.rest, self._held = self._held, ""
        return certain

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self) -> int:
        """The length of the longest suffix that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
