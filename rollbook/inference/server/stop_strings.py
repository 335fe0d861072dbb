"""Stop strings, watched while text arrives in pieces of any size: what may become one is held back until it is known."""

from collections.abc import Sequence


class StopStrings:
    """Feed it text; it gives what is certainly before any stop string. The cutting of the pieces changes nothing.

    Of several stop strings, the one that is complete first ends the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.behind = ""
        """From the match on: itself, and what came behind it in the piece that completed it."""

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        self._held += text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            told, self.behind, self._held = self._held[:start], self._held[start:], ""
            return told
        keep = self._length_to_hold()
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        told, self._held = self._held, ""
        return told

    def _length_to_hold(self) -> int:
        """The longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
