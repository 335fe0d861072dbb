"""Streams chat text in which tool calls may appear."""

from rollbook.contracts.tool_calls import OPENING, ToolCall, parse_tool_calls
from rollbook.inference.server.stop_strings import StopStrings


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
