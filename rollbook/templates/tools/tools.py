"""The tools that the policy may call, and their description for a real model."""

import json
from collections.abc import Mapping
from typing import Any

SYSTEM_PROMPT = """Answer the question. To call a tool, write exactly this and nothing else:
<tool_call>{"name": "get_temperature", "arguments": {"city": "Oslo"}}</tool_call>
get_temperature(city): the temperature in a city, in degrees."""


def call_tool(name: str, arguments: str, row: Mapping[str, Any]) -> str:
    """The result as text. The policy may write anything, so every mistake gets an answer that explains it."""
    if name != "get_temperature":
        return f"unknown tool {name!r}; the only tool is get_temperature"
    try:
        city = json.loads(arguments)["city"]
    except (ValueError, TypeError, KeyError):
        return 'the arguments must look like {"city": "Oslo"}'
    return str(row["degrees"]) if city == row["city"] else "unknown"
