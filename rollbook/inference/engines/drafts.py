"""Drafts the next tokens of a request by looking up its last tokens in its own prompt and answer. No second model is needed.

The engine computes the drafted tokens together with the last sampled one and samples after each of them, with the random number
that belongs to the place. Sampled tokens count up to the first one that is not the drafted one, so drafts change how many tokens a
round gives, never which. Edits, tool results that are quoted, and lists repeat what is there; other texts give few drafts.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

MATCH = 3
"""A draft continues an earlier place with the same tokens, so many. Fewer match by chance."""
TOKEN_BITS = 21
"""Of a token in the key of a match: three of them fit into 64 bits. No vocabulary is as large."""
NUMPY_FROM = 64
"""A context is indexed in Python if fewer tokens are added."""


class PromptLookup:
    """The tokens of one request, and where each sequence of `MATCH` tokens was last seen."""

    def __init__(self, tokens: NDArray[np.int32], *, most: int) -> None:
        """`most`: tokens in a draft."""
        self._tokens = array("i")
        self._next: dict[int, int] = {}
        """What follows a match, by its key: the index of the token after it."""
        self._most = most
        self._length = most
        self.extend(tokens)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Add tokens that were sampled."""
        start = max(MATCH - 1, len(self._tokens) - 1)
        self._tokens.frombytes(tokens.astype(np.int32, copy=False).tobytes())
        # Without the last one, which nothing follows yet.
        end = len(self._tokens) - 1
        if end - start >= NUMPY_FROM:
            known = np.frombuffer(self._tokens, dtype=np.int32).astype(np.int64)
            keys = sum(known[start - back : end - back] << (TOKEN_BITS * back) for back in range(MATCH))
            self._next.update(zip(np.asarray(keys).tolist(), range(start + 1, end + 1), strict=True))
            return
        for at in range(start, end):
            self._next[self._key(at)] = at + 1

    def draft(self, most: int) -> list[int]:
        """The tokens that followed the last tokens before; at most `most`."""
        count = min(most, self._length)
        if count < 1 or len(self._tokens) < MATCH:
            return []
        start = self._next.get(self._key(len(self._tokens) - 1))
        if start is None:
            return []
        drafted = self._tokens[start : start + count].tolist()
        # What repeats itself continues in the draft.
        period = len(self._tokens) - start
        while len(drafted) < count:
            drafted.append(drafted[len(drafted) - period])
        return drafted

    def sampled(self, *, drafted: int, accepted: int) -> None:
        """Shorter drafts after a wrong one, longer ones after a right one."""
        if drafted:
            longer = 2 * self._length if accepted == drafted else self._length
            self._length = min(self._most, longer) if 2 * accepted >= drafted else max(1, self._length // 2)

    def _key(self, at: int) -> int:
        """Of the match that ends at an index."""
        return sum(self._tokens[at - back] << (TOKEN_BITS * back) for back in range(MATCH))
