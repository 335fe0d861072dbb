"""Which blocks of the cache are free, used by rows, or kept for prompts that start with the same tokens. Host side only.

A block holds the keys and values of `size` consecutive tokens. A full block can be *registered*: then it is found by its tokens and
all tokens before them, so siblings of a group and later turns of an episode share it without a copy. A registered block that no row
uses stays cached until its space is needed and no other was used less recently. The key of a block contains its tokens and the
identity of the block before it, so a match is exact and needs no comparison. New weights forget all registrations.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

SCRATCH = 0
"""A block that is never allocated: entries of block tables that are not in use point to it."""


@dataclass(slots=True, eq=False)
class RowBlocks:
    """The blocks of one row, in order. The first `num_known` hold registered content; `parent` identifies the last of them."""

    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    parent: int = -1
    weights_generation: int = -1


class BlockPool:
    """Used by one thread. `limit` blocks at most, scratch included; `grow` adds blocks up to it."""

    def __init__(
        self,
        *,
        size: int,
        limit: int,
        max_cached: int,
        pin_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.limit = limit
        self.capacity = 1
        self.weights_generation = 0
        """Changes with the weights. Only rows computed completely since the last change are registered."""
        self._max_cached = max_cached
        self._pin_s = pin_s
        self._clock = clock
        self._free: list[int] = []
        self._uses: dict[int, int] = {}
        # Not a dict: finding its first entry takes longer the more entries were removed before it.
        self._cached: OrderedDict[int, float] = OrderedDict()
        """Registered blocks without a row, least recently used first, and when they were released."""
        self._registered: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._identities: dict[int, int] = {}
        self._new_identity = count()
        self._root = next(self._new_identity)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._uses)

    def num_available(self, *, are_pins_kept: bool = False) -> int:
        """Blocks that rows could still get, growth and eviction included."""
        evictable = len(self._cached)
        if are_pins_kept and self._pin_s:
            oldest_pinned = self._clock() - self._pin_s
            evictable = sum(released_at <= oldest_pinned for released_at in self._cached.values())
        return len(self._free) + evictable + self.limit - self.capacity

    def grow(self, capacity: int) -> None:
        """Add blocks up to `capacity` in all."""
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity

    def match(self, tokens: NDArray[np.int32]) -> RowBlocks:
        """A row that starts with the longest registered prefix of `tokens`, without the last token: its logits must be computed."""
        row = RowBlocks(parent=self._root, weights_generation=self.weights_generation)
        size = self.size * tokens.itemsize
        raw = tokens.tobytes()
        for start in range(0, (len(tokens) - 1) // self.size * size, size):
            block = self._registered.get((row.parent, raw[start : start + size]))
            if block is None:
                break
            row.blocks.append(block)
            row.parent = self._identities[block]
            self._cached.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1
        row.num_known = len(row.blocks)
        return row

    def allocate(self, number: int, *, are_pins_kept: bool = False) -> list[int] | None:
        """Blocks for one row each, evicting the least recently used. None, and no change, if there are not enough."""
        to_evict = number - len(self._free)
        if to_evict > len(self._cached):
            return None
        if to_evict > 0 and are_pins_kept and self._pin_s:
            youngest = next(islice(self._cached.values(), to_evict - 1, to_evict))
            if youngest > self._clock() - self._pin_s:
                return None
        for _ in range(to_evict):
            self._evict()
        blocks = self._free[len(self._free) - number :][::-1]
        del self._free[len(self._free) - number :]
        self._uses.update(dict.fromkeys(blocks, 1))
        return blocks

    def register(self, row: RowBlocks, tokens: NDArray[np.int32]) -> None:
        """Make more full blocks of a row available to others. `tokens`: those after its `num_known` blocks.

        Their keys must be computed, or be launched before any reader. Ignored if the weights changed since the row was matched.
        """
        if row.weights_generation != self.weights_generation or not self._max_cached:
            return
        size = self.size * tokens.itemsize
        raw = tokens.tobytes()
        for start in range(0, len(tokens) // self.size * size, size):
            key = (row.parent, raw[start : start + size])
            block = self._registered.get(key)
            if block is None:
                # If another row registered the same tokens before, this row keeps its copy for itself.
                block = row.blocks[row.num_known]
                self._registered[key] = block
                self._keys[block] = key
                self._identities[block] = next(self._new_identity)
            row.parent = self._identities[block]
            row.num_known += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A row no longer uses these blocks. Registered ones stay cached, the end of a sequence is evicted before its start."""
        now = self._clock()
        for block in reversed(blocks):
            uses = self._uses[block] - 1
            if uses:
                self._uses[block] = uses
                continue
            del self._uses[block]
            if block in self._keys:
                self._cached[block] = now
            else:
                self._free.append(block)
        while len(self._cached) > self._max_cached:
            self._evict()

    def weights_changed(self) -> None:
        """Forget all registrations. Rows keep their blocks."""
        self.weights_generation += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._registered.clear()
        self._keys.clear()
        self._identities.clear()
        self._root = next(self._new_identity)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._registered[self._keys.pop(block)]
        del self._identities[block]
        self._free.append(block)
