"""Parses tool calls out of sampled text in the Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Text that is not a valid call stays text, so the agent and the reward function see what the policy wrote.
"""

import json
import re
import uuid
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
