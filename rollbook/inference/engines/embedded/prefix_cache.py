"""Reuses earlier prefill work: keys and values of finished requests, and the logits of repeated prompts.

The next turn of an episode starts with the tokens of the previous turn, so only the new tokens must be prefilled. The prefix cache
holds copies of finished rows outside the slots and copies them into the row of a request that continues them, so slots, compaction
and captured graphs are not affected. Both caches are cleared when the weights change, and nothing is shared between adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollbook.inference.engines.embedded.slot_cache import RowMemory

BLOCK = 16
"""Prefixes are looked up at multiples of this many tokens, and then extended token by token."""
NOT_REUSABLE = -1
"""The weights generation of a request whose row does not hold the keys of its tokens."""


@dataclass(eq=False, slots=True)
class Prefix:
    """The tokens of a finished row, and the copy of its memory."""

    tokens: list[int]
    adapter: int
    cached_kv: Any
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    prefix: Prefix
    length: int


class PrefixCache:
    """Holds at most `max_tokens` positions (0: none) and evicts the least recently used. Used by one thread."""

    def __init__(self, slots: RowMemory, *, max_tokens: int, min_length: int, row_tokens: int = 0) -> None:
        """`row_tokens`: what a row takes whatever its length, in positions."""
        self._slots = slots
        self._max_tokens = max_tokens
        self._min_length, self._row_tokens = min_length, row_tokens
        self.weights_generation = 0
        """Changes with the weights. A row can be cached only if all of it was computed since the last change."""
        self.hits = self.cached_tokens = self.num_tokens = 0
        self._prefixes: dict[int, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def weights_changed(self) -> None:
        self.weights_generation += 1
        self._prefixes.clear()
        self._by_block.clear()
        self.num_tokens = 0

    def copy_out(self, row: int, length: int, *, weights_generation: int) -> Any | None:
        """A copy of the first `length` positions of a row; None if it is stale, too short or too long to be cached."""
        longest = self._max_tokens - self._row_tokens
        if weights_generation != self.weights_generation or not self._min_length <= length <= longest:
            return None
        return self._slots.copy_out(row, length)

    def add(self, tokens: list[int], cached_kv: Any, *, weights_generation: int, adapter: int = 0) -> None:
        """`cached_kv` covers at least these tokens. Ignored if the weights have changed since it was copied."""
        if weights_generation != self.weights_generation or len(tokens) < self._min_length:
            return
        blocks = tuple(_block_hashes(tokens, adapter))
        known = next((self._by_block[block] for block in reversed(blocks) if block in self._by_block), None)
        if known is not None and known.adapter == adapter and tokens[: len(known.tokens)] == known.tokens:
            # The new prefix continues this one and contains all of it.
            self._evict(known)
        prefix = Prefix(tokens, adapter, cached_kv, blocks)
        self._prefixes[id(prefix)] = prefix
        self._by_block.update(dict.fromkeys(blocks, prefix))
        self.num_tokens += len(tokens) + self._row_tokens
        while self.num_tokens > self._max_tokens:
            self._evict(next(iter(self._prefixes.values())))

    def find(self, tokens: Sequence[int], *, adapter: int = 0) -> PrefixHit | None:
        """The longest cached prefix, without the last token: its logits must be computed."""
        if not self._slots.is_croppable:
            return self._find_whole(tokens, adapter)
        if not self._prefixes:
            return None
        for number, block in reversed(list(enumerate(_block_hashes(tokens, adapter), start=1))):
            prefix = self._by_block.get(block)
            if prefix is None or prefix.adapter != adapter:
                continue
            length = _common_length(prefix.tokens, tokens, start=number * BLOCK)
            if length < self._min_length:
                return None
            self._prefixes[id(prefix)] = self._prefixes.pop(id(prefix))
            return PrefixHit(prefix, length)
        return None

    def _find_whole(self, tokens: Sequence[int], adapter: int) -> PrefixHit | None:
        """The longest cached row that the tokens continue: windows and recurrent states exist only for its end."""
        wanted = list(tokens)
        found: Prefix | None = None
        for prefix in self._prefixes.values():
            length = len(prefix.tokens)
            is_longer = length < len(wanted) and (found is None or length > len(found.tokens))
            if is_longer and prefix.adapter == adapter and wanted[:length] == prefix.tokens:
                found = prefix
        if found is None:
            return None
        self._prefixes[id(found)] = self._prefixes.pop(id(found))
        return PrefixHit(found, len(found.tokens))

    def copy_in(self, hit: PrefixHit, row: int) -> None:
        self._slots.copy_in(row, hit.prefix.cached_kv, hit.length)
        self.hits += 1
        self.cached_tokens += hit.length

    def _evict(self, prefix: Prefix) -> None:
        del self._prefixes[id(prefix)]
        self.num_tokens -= len(prefix.tokens) + self._row_tokens
        for block in prefix.blocks:
            if self._by_block.get(block) is prefix:
                del self._by_block[block]


class PromptMemo:
    """Next-token logits of recent prompts, at most `capacity`; evicts the least recently used. A key is an adapter and tokens.

    Episodes of one group repeat the same short prompts. A request for a single token needs only these logits, so a repeated prompt
    costs no forward.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def get(self, key: tuple[int, ...]) -> Tensor | None:
        logits_V = self._rows.pop(key, None)
        if logits_V is not None:
            self._rows[key] = logits_V
        return logits_V

    def put(self, key: tuple[int, ...], logits_V: Tensor) -> None:
        if not self._capacity:
            return
        if len(self._rows) >= self._capacity:
            del self._rows[next(iter(self._rows))]
        # A copy: a view would keep the logits of the whole forward alive.
        self._rows[key] = logits_V.clone()

    def clear(self) -> None:
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)


def _block_hashes(tokens: Sequence[int], adapter: int) -> list[int]:
    """One hash for each full block, over the adapter and all tokens up to its end."""
    hashes: list[int] = []
    previous = adapter
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        previous = hash((previous, *tokens[start : start + BLOCK]))
        hashes.append(previous)
    return hashes


def _common_length(known: Sequence[int], tokens: Sequence[int], *, start: int) -> int:
    """Length of the common prefix, without the last of `tokens`. Checks all tokens, because hashes can collide."""
    longest = min(len(known), len(tokens) - 1)
    length = min(start, longest)
    if known[:length] != list(tokens[:length]):
        return 0
    while length < longest and known[length] == tokens[length]:
        length += 1
    return length
