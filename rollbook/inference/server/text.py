"""Text around token ids: the tokenizer protocol, incremental decoding, stop strings, tool calls in streams."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollbook.contracts.output_formats import OPENING, ToolCall, parse_tool_calls

REPLACEMENT = "\ufffd"
"""Decoders write it for bytes that do not form a complete character (yet)."""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. The caller of `build_app` provides it, so no tokenizer library is imported here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_token_ids(self) -> Sequence[int]:
        """Control tokens, which are no text."""

    def encode_prompt(self, text: str) -> list[int]:
        """A text prompt, with the special tokens that the model expects at its start."""

    def encode(self, text: str) -> list[int]:
        """Text without added special tokens. A rendered chat contains its own."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be an incomplete character."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The chat template applied to the messages. Raises `EpisodeError` where the template rejects them."""


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
        self._stops = tuple(stops)
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


class ToolCallStream:
    """Passes streamed text on up to the first tool call, and holds the rest until it can be parsed."""

    def __init__(self) -> None:
        self._opening = StopStrings([OPENING])
        self._held = ""

    def feed(self, text: str) -> str:
        if self._opening.matched is not None:
            self._held += text
            return ""
        passed = self._opening.feed(text)
        self._held = self._opening.rest
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The held text without its valid calls, and those calls."""
        return parse_tool_calls(self._opening.finish() + self._held)
