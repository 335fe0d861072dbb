"""Formats of sampled text that agents require: tool calls in the Hermes format, JSON of a schema, and text in parts.

Tool calls are parsed from text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Text that is not a valid call stays
text, so the agent and the reward function see what the policy wrote. Grammars restrict sampling to a format; they are text in the
Lark dialect of llguidance. The policy server and the proxy write them; the policy server compiles them.

Servers parse sampled text in their event loop, and a policy may write anything. So the time of every parser is proportional to the
length of the text, and no regular expression with lazy or nested repetition is used (`tests/properties/test_text_parsers.py`).
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.decoding import is_too_deep, load_json, valid_text

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


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
    kept: list[str] = []
    kept_until = 0
    for begin, end in tagged_spans(text, OPENING, CLOSING):
        call = parse_call(text[begin:end].strip())
        if call is not None:
            calls.append(call)
            kept.append(text[kept_until : begin - len(OPENING)])
            kept_until = end + len(CLOSING)
    return "".join(kept) + text[kept_until:], calls


def tagged_spans(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Start and end of the text between each opening tag and the next closing one. Tags are not nested."""
    begin = text.find(opening)
    while begin >= 0:
        begin += len(opening)
        end = text.find(closing, begin)
        if end < 0:
            return
        yield begin, end
        begin = text.find(opening, end + len(closing))


def parse_call(text: str) -> ToolCall | None:
    """One call as JSON: `name`, and `arguments` or `parameters` as an object or as JSON text. None for anything else.

    JSON that is nested too deeply, and numbers that JSON cannot hold, are no call. Lone surrogates stay escaped. So every call can
    be sent, recorded and parsed.
    """
    try:
        return call_of(load_json(text))
    except ValueError:
        return None


def call_of(call: Any) -> ToolCall | None:
    """The same from decoded JSON."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, dict):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            return None
    if not isinstance(arguments, str) or is_too_deep(arguments):
        return None
    return ToolCall(valid_text(call["name"]), valid_text(arguments))


# Grammars

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout that chat templates write. A free layout would let a weak policy write blanks without end."""


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema; without one, any JSON object."""
    return f"start: {_json_rule(schema if schema is not None else {'type': 'object'})}\n"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(map(_literal, choices)) + "\n"


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], *, form: str = "hermes", is_single: bool = False) -> str:
    """One call or more of these tools, in OpenAI's format of tools. `form` is the format of calls: `hermes`, `json` or `llama`.

    Raises `ValueError` for a form that has no grammar.
    """
    arguments = {"hermes": "arguments", "json": "parameters", "llama": "parameters"}.get(form)
    if arguments is None:
        raise ValueError(f"calls in the format {form!r} have no grammar; use hermes, json or llama")
    functions = [tool["function"] for tool in tools]
    names = [json.dumps(function["name"], ensure_ascii=False) for function in functions]
    lines = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        opening = _literal(f'{{"name": {names[at]}, "{arguments}": ')
        lines += [f'call_{at}: {opening} arguments_{at} "}}"']
        lines += [f"arguments_{at}: {_json_rule(function.get('parameters') or {'type': 'object'})}"]
    if form != "hermes":
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
MAX_CHARACTER_TOKENS = 8
"""More tokens than any character has: a token has at least one of its four bytes, or no text."""


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
        """Text before this token was returned."""

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
        end = len(self._ids)
        if not is_last and (len(now) <= len(before) or now.endswith(REPLACEMENT)):
            # A character has at most four bytes, so older tokens have their final text. Without this, a policy that samples
            # invalid bytes or special tokens only would make each call decode all of them again.
            end -= MAX_CHARACTER_TOKENS
            if end - self._window_end < MAX_CHARACTER_TOKENS:
                return ""
            now = self._decode(self._ids[self._window_start : end])
        self._window_start, self._window_end = self._window_end, end
        return now[len(before) :]


MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 512
"""Stop strings of a request and the length of each, messages and tools. Each sampled token is compared with all stop strings, and a
chat template reads all messages and tools."""


def checked_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    """Raises `ValueError` for too many or too long stop strings."""
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"stop: at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters are allowed")
    return stops


def check_chat_size(messages: Sequence[object] | None, tools: Sequence[object] | None) -> None:
    """Raises `ValueError` for too many messages or tools."""
    for name, items, most in (("messages", messages, MAX_MESSAGES), ("tools", tools, MAX_TOOLS)):
        if items is not None and len(items) > most:
            raise ValueError(f"{name}: {len(items)} are too many; at most {most} are allowed")


class StopStrings:
    """Finds stop strings in text that arrives in parts, and returns the text before them.

    Text that may be the start of a stop string is held back. The result does not depend on how the text is split. Of several
    stop strings, the first complete one ends the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(_StopString(stop) for stop in dict.fromkeys(stops) if stop)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""
        """The text from the start of the match on."""

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        self._held += text
        matches = [
            (start + len(stop.text), start, stop.text)
            for stop in self._stops
            if (start := self._held.find(stop.text)) >= 0
        ]
        if matches:
            _, split, self.matched = min(matches)
        else:
            split = len(self._held) - max((stop.length_to_hold(text) for stop in self._stops), default=0)
        certain, self._held = self._held[:split], self._held[split:]
        if matches:
            self.rest, self._held = self._held, ""
        return certain

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _StopString:
    """One stop string, with the part of it that the text so far ends with (the algorithm of Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._matched = 0
        # For each prefix: the length of its longest proper suffix that is a prefix too. Made when it is first needed.
        self._borders = [0]

    def length_to_hold(self, new_text: str) -> int:
        """The length of the longest suffix of the text so far that is a proper prefix of the stop string."""
        recent = new_text[-(len(self.text) - 1) :] if len(self.text) > 1 else ""
        if len(recent) == len(self.text) - 1:
            self._matched = 0
        for char in recent:
            self._matched = self._extended(self._matched, char)
        return self._matched

    def _extended(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._border(matched)
        return matched + (self.text[matched] == char)

    def _border(self, length: int) -> int:
        while len(self._borders) < length:
            self._borders.append(self._extended(self._borders[-1], self.text[len(self._borders)]))
        return self._borders[length - 1]
