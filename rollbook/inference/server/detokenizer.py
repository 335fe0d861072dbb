"""Tokens to text as they come: never half a character, and all pieces together are what decoding at once gives.

Decoding token by token is wrong for two reasons: a character may be spread over several tokens, and a tokenizer may treat the first
token of a text in its own way. So a short window before the new tokens is decoded along, and only what is added to it is told.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no whole character (yet)."""

Decode = Callable[[Sequence[int]], str]


class IncrementalText:
    """Feed it tokens; it gives the text that is certain."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_start = 0
        self._told_until = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete. Empty while a character is unfinished."""
        self._ids.extend(token_ids)
        return self._advance(is_last=False)

    def finish(self) -> str:
        """What was held back: bytes that never became a character."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._window_start : self._told_until])
        now = self._decode(self._ids[self._window_start :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not is_last):
            return ""
        self._window_start, self._told_until = self._told_until, len(self._ids)
        return now[len(before) :]
