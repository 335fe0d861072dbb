"""Which blocks of the cache are free, used by rows, or kept for prompts that start with the same tokens. Host side only.

A block holds the keys and values of `size` consecutive tokens. A full block can be *registered*: then it is found by its tokens and
all tokens before them, so siblings of a group and later turns of an episode share it without a copy. A registered block that no row
uses stays cached until its space is needed and no other was used less recently. Registered blocks form a tree, in which each block
finds those that continue it by their tokens, so a match is exact. New weights forget all registrations.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

SCRATCH = 0
"""A block that is never allocated: entries of block tables that are not in use point to it."""


@dataclass(slots=True, eq=False)
class _Node:
    """A registered block in the tree, or its root."""

    block: int = SCRATCH
    tokens: bytes = b""
    siblings: "dict[bytes, _Node]" = field(default_factory=dict)
    """The children of its parent, this one included."""
    children: "dict[bytes, _Node]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RowBlocks:
    """The blocks of one row, in order. The first `num_known` hold registered content; `node` is the last of them in the tree."""

    node: _Node
    weights_generation: int
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0


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
        self._uses = [0]
        """Rows that use each block."""
        self._nodes: list[_Node | None] = [None]
        """The place of each block in the tree, if it is registered."""
        # Not a dict: finding its first entry takes longer the more entries were removed before it.
        self._cached: OrderedDict[int, float] = OrderedDict()
        """Registered blocks without a row, least recently used first, and when they were released."""
        self._root = _Node()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.capacity - 1 - len(self._free) - len(self._cached)

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
        self._uses += [0] * (capacity - self.capacity)
        self._nodes += [None] * (capacity - self.capacity)
        self.capacity = capacity

    def match(self, tokens: NDArray[np.int32]) -> RowBlocks:
        """A row that starts with the longest registered prefix of `tokens`, without the last token: its logits must be computed."""
        node, blocks = self._root, []
        size = self.size * tokens.itemsize
        raw = tokens.tobytes()
        for start in range(0, (len(tokens) - 1) // self.size * size, size):
            child = node.children.get(raw[start : start + size])
            if child is None:
                break
            node = child
            blocks.append(child.block)
        uses = self._uses
        for block in blocks:
            if not uses[block]:
                del self._cached[block]
            uses[block] += 1
        return RowBlocks(node, self.weights_generation, blocks, num_known=len(blocks))

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
        for block in blocks:
            self._uses[block] = 1
        return blocks

    def register(self, row: RowBlocks, tokens: NDArray[np.int32]) -> None:
        """Make more full blocks of a row available to others. `tokens`: those after its `num_known` blocks.

        Their keys must be computed, or be launched before any reader. Ignored if the weights changed since the row was matched.
        """
        if row.weights_generation != self.weights_generation or not self._max_cached:
            return
        node = row.node
        size = self.size * tokens.itemsize
        raw = tokens.tobytes()
        for start in range(0, len(tokens) // self.size * size, size):
            content = raw[start : start + size]
            child = node.children.get(content)
            if child is None:
                # If another row registered the same tokens before, this row keeps its copy for itself.
                block = row.blocks[row.num_known]
                child = _Node(block, content, siblings=node.children)
                node.children[content] = self._nodes[block] = child
            node = child
            row.num_known += 1
        row.node = node

    def release(self, blocks: Sequence[int]) -> None:
        """A row no longer uses these blocks. Registered ones stay cached, the end of a sequence is evicted before its start."""
        now, uses = self._clock(), self._uses
        for block in reversed(blocks):
            uses[block] -= 1
            if uses[block]:
                continue
            if self._nodes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = now
        while len(self._cached) > self._max_cached:
            self._evict()

    def weights_changed(self) -> None:
        """Forget all registrations. Rows keep their blocks."""
        self.weights_generation += 1
        self._free.extend(self._cached)
        self._cached.clear()
        for node in self._nodes:
            if node is not None:
                # Without it the tree is a circle of references, which only the garbage collector frees.
                node.siblings = {}
        self._nodes = [None] * self.capacity
        self._root = _Node()

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        node = self._nodes[block]
        assert node is not None, "only registered blocks are cached"
        del node.siblings[node.tokens]
        self._nodes[block] = None
        self._free.append(block)
