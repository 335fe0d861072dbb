"""Tool calls as models write them: found in sampled text, and given to the agent in OpenAI's shape.

What cannot be read as a call stays text: the agent sees what the policy really said, and nothing is repaired behind its back.
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollbook.contracts.plugin import load_plugin


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text, as OpenAI gives it."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def says(self) -> tuple[str, str]:
        """What is called with what, however it was written."""
        return self.name, canonical_arguments(self.arguments)

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy said, taken apart."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    def is_same_as(self, other: "Said") -> bool:
        """White space around text and the layout of JSON are no difference."""
        mine, theirs = ([call.says() for call in said.calls] for said in (self, other))
        return self.content.strip() == other.content.strip() and mine == theirs


ToolParser: TypeAlias = Callable[[str], Said]


def canonical_arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str) -> Said:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them: Qwen, Hermes and many others."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    for found in _HERMES.finditer(text):
        call = _call(found[1])
        if call is None:
            continue
        kept.append(text[at : found.start()])
        calls.append(call)
        at = found.end()
    kept.append(text[at:])
    content = "".join(kept)
    return Said(content.strip() if calls else content, tuple(calls))


def parse_json(text: str) -> Said:
    """The whole text is one call, `{"name": …, "parameters": {…}}`: Llama 3."""
    call = _call(text.strip().removeprefix("<|python_tag|>"))
    return Said(text) if call is None else Said("", (call,))


def parse_nothing(text: str) -> Said:
    return Said(text)


PARSERS: dict[str, ToolParser] = {"hermes": parse_hermes, "json": parse_json, "none": parse_nothing}


def load_parser(name: str) -> ToolParser:
    """One of the table, or `module:function` that takes the text and returns a `Said`."""
    if name in PARSERS:
        return PARSERS[name]
    parser: ToolParser = load_plugin(name, setting="tool_parser")
    return parser


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
