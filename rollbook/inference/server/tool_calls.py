"""Finds tool calls in what a model wrote: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form most open models share.

What does not parse stays text: a malformed call is the model's own answer, and whoever scores it must see it.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from rollbook.inference.server.stop_strings import StopStrings

OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text, as the protocol wants it."""


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without the calls that could be read, and those calls in order."""
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        call = _call(block.group(1))
        if call is None:
            return block.group(0)
        calls.append(call)
        return ""

    return _BLOCK.sub(take, text), calls


def _call(body: str) -> ToolCall | None:
    try:
        value: Any = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


class ToolCallText:
    """Text of a stream in which a tool call may come: told up to the first call, held from there on until it can be read."""

    def __init__(self) -> None:
        self._before = StopStrings([OPENING])
        self._held = ""

    def feed(self, text: str) -> str:
        if self._before.matched is not None:
            self._held += text
            return ""
        told = self._before.feed(text)
        self._held = self._before.behind
        return told

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held and is no call, and the calls."""
        rest, calls = parse_tool_calls(self._before.finish() + self._held)
        return rest, calls
