"""Parsers that split sampled text into content and tool calls, one per format that models write.

Only the answer is parsed: a call that a policy writes in a thought is not executed. What is not a valid call stays text, so the
agent and the reward function see what the policy wrote.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from rollbook.contracts.decoding import is_too_deep, load_json
from rollbook.contracts.output_formats import (
    CLOSING,
    OPENING,
    ToolCall,
    call_of,
    parse_call,
    parse_tool_calls,
    tagged_spans,
)
from rollbook.contracts.plugin import PluginError, load_plugin

THINKING_TAGS = ("<think>", "</think>")
PROMPT_END_CHARS = 64
"""The end of a prompt in which the start of a thought is looked for."""
MAX_PYTHON_CHARS = 20_000
"""Longer text is no call in Python's syntax: its parser takes more memory for each character than those of the other formats."""
MAX_SCHEMA_DEPTH = 8

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
"""In OpenAI's format."""


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


class ToolParser(Protocol):
    def __call__(self, text: str, tools: Tools = None, prompt: str = "") -> ParsedText:
        """`tools`: those that the policy may call, with the types of their parameters. `prompt`: what the text follows, which may
        begin a thought."""


def canonical_arguments(text: str) -> str:
    """JSON with sorted keys and one layout; other text unchanged."""
    try:
        return json.dumps(load_json(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


def answer_span(text: str, prompt: str, tags: tuple[str, str] = THINKING_TAGS) -> tuple[int, int]:
    """Start and end of the text that is no thought: after the last end of one, up to the next start."""
    start, end = tags
    last = text.rfind(end)
    if last < 0 and prompt[-PROMPT_END_CHARS:].rstrip().endswith(start):
        return len(text), len(text)
    begin = last + len(end) if last >= 0 else 0
    until = text.find(start, begin)
    return begin, len(text) if until < 0 else until


@dataclass(frozen=True, slots=True)
class BuiltInParser:
    """A format of tool calls."""

    name: str
    parse: Callable[[str, Tools], tuple[str, Sequence[ToolCall]]]
    opening: str | None = None
    """What every call begins with; None: one may begin anywhere. Empty: there are no calls."""
    tags: tuple[str, str] = THINKING_TAGS
    """The texts around a thought."""

    def __call__(self, text: str, tools: Tools = None, prompt: str = "") -> ParsedText:
        begin, end = answer_span(text, prompt, self.tags)
        content, calls = self.parse(text[begin:end], tools)
        return ParsedText((text[:begin] + content + text[end:]).strip(), tuple(calls)) if calls else ParsedText(text)


def _whole(call: ToolCall | None, text: str) -> tuple[str, Sequence[ToolCall]]:
    return (text, ()) if call is None else ("", (call,))


def _json(text: str, tools: Tools) -> tuple[str, Sequence[ToolCall]]:
    return _whole(parse_call(text.strip().removeprefix("<|python_tag|>")), text)


def _llama(text: str, tools: Tools) -> tuple[str, Sequence[ToolCall]]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    try:
        values = list(_objects(body)) if body.startswith("{") else _listed(body) if body.startswith("[") else []
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # MemoryError: nested too deeply for Python's parser
        return text, ()
    calls = [call for value in values if (call := call_of(value)) is not None]
    return ("", calls) if calls and len(calls) == len(values) else (text, ())


_SEPARATOR = re.compile(r"\s*(;?)\s*")


def _objects(text: str) -> Iterator[Any]:
    """JSON objects with semicolons between them. Raises `ValueError`."""
    if is_too_deep(text):
        raise ValueError("nested too deeply")
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        separator = _SEPARATOR.match(text, at)
        assert separator is not None
        if separator.end() < len(text) and not separator[1]:
            raise ValueError("no semicolon between two objects")
        at = separator.end()


def _listed(text: str) -> list[Any]:
    """A list of calls, as JSON or in Python's syntax, `[f(x=1), g()]`. Raises `SyntaxError` and others for anything else."""
    with suppress(ValueError):
        found = load_json(text)
        return found if isinstance(found, list) else []
    if len(text) > MAX_PYTHON_CHARS:
        return []
    with warnings.catch_warnings():
        # Of escapes that Python does not know. They are part of what the policy wrote.
        warnings.simplefilter("ignore")
        tree = ast.parse(text, mode="eval").body
    return [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []


def _python_call(node: ast.expr) -> dict[str, Any]:
    """Raises `ValueError` for anything but a call whose arguments are literals with names."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    names = [keyword.arg for keyword in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError("an argument has no name, or two have the same")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return {"name": _dotted(node.func), "arguments": arguments}


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("no name of a function")
    return ".".join([node.id, *reversed(parts)])


def _qwen(text: str, tools: Tools) -> tuple[str, Sequence[ToolCall]]:
    calls: list[ToolCall] = []
    kept, kept_until = [], 0
    for begin, end in tagged_spans(text, OPENING, CLOSING):
        if (call := _function(text[begin:end].strip(), tools)) is not None:
            calls.append(call)
            kept.append(text[kept_until : begin - len(OPENING)])
            kept_until = end + len(CLOSING)
    return "".join(kept) + text[kept_until:], calls


def _function(text: str, tools: Tools) -> ToolCall | None:
    """`<function=NAME>`, any number of `<parameter=NAME>` value `</parameter>`, and `</function>`."""
    name, found, rest = text.removeprefix("<function=").partition(">")
    if not (text.startswith("<function=") and found and name.strip() and rest.endswith("</function>")):
        return None
    schemas = _parameters(tools, name.strip())
    arguments: dict[str, Any] = {}
    body, at = rest.removesuffix("</function>"), 0
    for begin, end in tagged_spans(body, "<parameter=", "</parameter>"):
        key, found, value = body[begin:end].partition(">")
        if body[at : begin - len("<parameter=")].strip() or not found or not key.strip() or key.strip() in arguments:
            return None
        arguments[key.strip()] = _typed(value.removeprefix("\n").removesuffix("\n"), schemas(key.strip()))
        at = end + len("</parameter>")
    return None if body[at:].strip() else call_of({"name": name.strip(), "arguments": arguments})


def _parameters(tools: Tools, name: str) -> Callable[[str], frozenset[str]]:
    """The JSON types of each parameter of a tool; empty where unknown."""
    functions = (_object(tool.get("function")) for tool in tools or ())
    schema = _object(next((found.get("parameters") for found in functions if found.get("name") == name), None))
    properties, shared = _object(schema.get("properties")), _object(schema.get("$defs"))
    return lambda key: frozenset(_types(properties.get(key), shared))


def _object(value: Any) -> Mapping[str, Any]:
    """Agents send the tools: anything may be missing, or have another type."""
    return value if isinstance(value, Mapping) else {}


def _types(schema: Any, shared: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    schema = _object(schema)
    kinds = schema.get("type")
    yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    if depth == MAX_SCHEMA_DEPTH:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(shared.get(reference.removeprefix("#/$defs/")), shared, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        for inner in found if isinstance(found := schema.get(name), list) else ():
            yield from _types(inner, shared, depth + 1)


_WRITTEN_BY_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value of a parameter. Text, unless its types are others: then JSON, or text if it is none, which the tool refuses."""
    written = text.strip()
    written = _WRITTEN_BY_PYTHON.get(written, written)
    is_text = not types or "string" in types
    if is_text and not (written == "null" and "null" in types):
        return text
    try:
        return load_json(written)
    except ValueError:
        return text


parse_hermes = BuiltInParser("hermes", lambda text, tools: parse_tool_calls(text), OPENING)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Qwen, Hermes and others."""
parse_json = BuiltInParser("json", _json)
"""The whole answer is one call, `{"name": ..., "parameters": {...}}`."""
parse_llama = BuiltInParser("llama", _llama)
"""The whole answer is calls: JSON objects with `;` between them, a JSON list of them, or `[name(x=1), ...]`. Llama 3 and 4."""
parse_qwen = BuiltInParser("qwen", _qwen, OPENING)
"""`<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>`, any number of them: Qwen3-Coder, Qwen3.5.
Values have the types of the tool's parameters."""
parse_none = BuiltInParser("none", lambda text, tools: (text, ()), "")

PARSERS = {parser.name: parser for parser in (parse_hermes, parse_json, parse_llama, parse_qwen, parse_none)}


def load_parser(name: str, *, tags: tuple[str, str] = THINKING_TAGS) -> ToolParser:
    """A built-in parser, or `module:function` that takes the text and returns a `ParsedText`. `tags`: around a thought."""
    if name in PARSERS:
        return replace(PARSERS[name], tags=tags)
    own = load_plugin(name, setting="tool_parser", builtin=dict.fromkeys(PARSERS, __name__))

    def parse(text: str, tools: Tools = None, prompt: str = "") -> ParsedText:
        parsed = own(text)
        if not isinstance(parsed, ParsedText):
            kind = type(parsed).__name__
            raise PluginError(f"tool_parser = {name!r} returned a {kind}; it must return a rollbook.ParsedText")
        return parsed

    return parse
