"""Keys and values of finished requests, kept for the prompt that goes on where one of them ended.

The next turn of an episode begins with the tokens of the last one: only what is new must be prefilled. A copy of a finished row is
taken out of the slots and copied into the row of whoever extends it, so slots, compaction and captured steps know nothing of it.
Whoever changes the weights clears it: what is kept was computed by the weights in use, all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollbook.inference.engines.embedded.cache.slot_cache import SlotCache

BLOCK = 16
"""Prefixes are found at multiples of this many tokens, and then followed token by token."""
NEVER = -1
"""The mark of a request whose row does not hold what its tokens say."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A finished row: its tokens, and their keys and values, one tensor or two a layer."""

    tokens: list[int]
    kept: Sequence[Tensor]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    prefix: Prefix
    length: int


class PrefixStore:
    """Least recently used goes first. Holds at most `max_tokens` positions; 0 keeps nothing. One thread's."""

    def __init__(self, slots: SlotCache, *, max_tokens: int, least: int) -> None:
        self._slots = slots
        self._max_tokens = max_tokens
        self._least = least
        self.mark = 0
        """Changes with the weights. A row may be kept only if all of it was computed since."""
        self.hits = self.cached_tokens = self.num_tokens = 0
        self._prefixes: dict[int, Prefix] = {}
        self._found_at: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def weights_changed(self) -> None:
        self.mark += 1
        self._prefixes.clear()
        self._found_at.clear()
        self.num_tokens = 0

    def take_out(self, row: int, length: int, *, mark: int) -> Sequence[Tensor] | None:
        """A copy of the first `length` positions of a row; None where it may not or need not be kept."""
        if mark != self.mark or not self._least <= length <= self._max_tokens:
            return None
        return self._slots.row_copy(row, length)

    def keep(self, tokens: list[int], kept: Sequence[Tensor], *, mark: int) -> None:
        """`kept` holds at least these tokens. Dropped if the weights have changed since it was taken out."""
        if mark != self.mark or len(tokens) < self._least:
            return
        blocks = tuple(_block_hashes(tokens))
        known = next((self._found_at[block] for block in reversed(blocks) if block in self._found_at), None)
        if known is not None and tokens[: len(known.tokens)] == known.tokens:
            # It goes on where that one ended, and has all that it had.
            self._forget(known)
        prefix = Prefix(tokens, kept, blocks)
        self._prefixes[id(prefix)] = prefix
        self._found_at.update(dict.fromkeys(blocks, prefix))
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._prefixes.values())))

    def find(self, tokens: Sequence[int]) -> PrefixHit | None:
        """The longest known beginning, short of the last token: its logits must be computed."""
        if not self._prefixes:
            return None
        for number, block in reversed(list(enumerate(_block_hashes(tokens), start=1))):
            prefix = self._found_at.get(block)
            if prefix is None:
                continue
            length = _common(prefix.tokens, tokens, begin=number * BLOCK)
            if length < self._least:
                return None
            self._prefixes[id(prefix)] = self._prefixes.pop(id(prefix))
            return PrefixHit(prefix, length)
        return None

    def put_in(self, hit: PrefixHit, row: int) -> None:
        """Into a slot that is there."""
        self._slots.row_paste(row, hit.prefix.kept, hit.length)
        self.hits += 1
        self.cached_tokens += hit.length

    def _forget(self, prefix: Prefix) -> None:
        del self._prefixes[id(prefix)]
        self.num_tokens -= len(prefix.tokens)
        for block in prefix.blocks:
            if self._found_at.get(block) is prefix:
                del self._found_at[block]


def _block_hashes(tokens: Sequence[int]) -> list[int]:
    """One for each whole block, of everything up to its end."""
    found: list[int] = []
    before = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        found.append(before)
    return found


def _common(known: Sequence[int], tokens: Sequence[int], *, begin: int) -> int:
    """How far they agree, at most to the last but one of `tokens`. Hashes may collide: nothing is taken on trust."""
    most = min(len(known), len(tokens) - 1)
    if known[: min(begin, most)] != list(tokens[: min(begin, most)]):
        return 0
    at = min(begin, most)
    while at < most and known[at] == tokens[at]:
        at += 1
    return at
