"""Which blocks of the cache are free, used by rows, or kept for prompts that start with the same tokens. Host side only.

A block holds the keys and values of `size` consecutive tokens. Full blocks can be *registered*: then they are found by their tokens
and all tokens before them, so siblings of a group and later turns of an episode share them without a copy. Registered blocks that
no row uses stay cached until their space is needed and no others were used less recently. They form a tree whose nodes are runs of
blocks, so a long conversation is a few comparisons, and a match is exact. Each adapter has a tree of its own. New weights forget
all registrations.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SCRATCH = 0
"""A block that is never allocated: entries of block tables that are not in use point to it."""


@dataclass(slots=True, eq=False)
class _Node:
    """Consecutive registered blocks, or the root of the tree, which has none."""

    tokens: bytes = b""
    blocks: list[int] = field(default_factory=list)
    parent: "_Node | None" = None
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    """By the tokens of their first block."""
    num_rows: int = 0
    """Rows whose tokens include those of this node. A row that ends within a node splits it."""


@dataclass(slots=True, eq=False)
class RowBlocks:
    """The blocks of one row, in order. The first `num_known` hold registered content, which ends with `node`."""

    node: _Node
    weights_generation: int
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    copies: list[int] = field(default_factory=list)
    """Blocks of the row whose content another row registered first."""


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
        self.num_cached = 0
        """Registered blocks without a row."""
        self._block_bytes = size * np.dtype(np.int32).itemsize
        self._max_cached = max_cached
        self._pin_s = pin_s
        self._clock = clock
        self._free: list[int] = []
        # Not a dict: finding its first entry takes longer the more entries were removed before it.
        self._cached: OrderedDict[_Node, float] = OrderedDict()
        """Nodes without a row and when they were released, least recently used first, and each before its parent."""
        self._roots: dict[int, _Node] = {}
        """The trees, by adapter."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - 1 - len(self._free) - self.num_cached

    def num_available(self, *, are_pins_kept: bool = False) -> int:
        """Blocks that rows could still get, growth and eviction included."""
        return len(self._free) + self._num_evictable(are_pins_kept=are_pins_kept) + self.limit - self.capacity

    def grow(self, capacity: int) -> None:
        """Add blocks up to `capacity` in all."""
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity

    def shrink(self, capacity: int) -> None:
        """Have `capacity` blocks from now on. No row may have blocks, and none may be registered."""
        assert not self.num_used, "rows have blocks"
        assert not self.num_cached, "blocks are registered"
        self.capacity = self.limit = capacity
        self._free = list(range(capacity - 1, SCRATCH, -1))

    def match(self, tokens: NDArray[np.int32], *, adapter: int = 0) -> RowBlocks:
        """A row that starts with the longest registered prefix of `tokens`."""
        row = RowBlocks(self._roots.setdefault(adapter, _Node()), self.weights_generation)
        row.blocks = self._enter(row, tokens.tobytes(), self._matchable(tokens))
        return row

    def num_held(self, tokens: NDArray[np.int32], *, adapter: int = 0, are_pins_kept: bool = False) -> int:
        """How many of the blocks that `match` would find are used or pinned, so that `num_available` does not count them."""
        oldest = self._oldest_pin() if are_pins_kept else math.inf
        path = self._path(self._roots.get(adapter, _Node()), tokens.tobytes(), self._matchable(tokens))
        return sum(count for node, count in path if node.num_rows or self._cached[node] > oldest)

    def allocate(self, number: int, *, are_pins_kept: bool = False) -> list[int] | None:
        """Blocks for one row each, evicting the least recently used. None, and no change, if there are not enough."""
        to_evict = number - len(self._free)
        if to_evict > self._num_evictable(are_pins_kept=are_pins_kept):
            return None
        self._evict(to_evict)
        blocks = self._free[len(self._free) - number :][::-1]
        del self._free[len(self._free) - number :]
        return blocks

    def register(self, row: RowBlocks, tokens: NDArray[np.int32]) -> None:
        """Make more full blocks of a row available to others. `tokens`: those after its `num_known` blocks.

        Their keys must be computed, or be launched before any reader. Ignored if the weights changed since the row was matched.
        """
        if row.weights_generation != self.weights_generation or not self._max_cached:
            return
        raw = tokens.tobytes()
        first, end = row.num_known, len(tokens) // self.size * self._block_bytes
        shared = self._enter(row, raw, end)
        row.copies += row.blocks[first : row.num_known]
        content = raw[len(shared) * self._block_bytes : end]
        if not content:
            return
        blocks = row.blocks[row.num_known : row.num_known + len(content) // self._block_bytes]
        row.num_known += len(blocks)
        if row.node.num_rows == 1 and not row.node.children:
            row.node.tokens += content
            row.node.blocks += blocks
        else:
            new = _Node(content, blocks, parent=row.node, num_rows=1)
            row.node.children[self._key(new)] = new
            row.node = new

    def release(self, row: RowBlocks) -> None:
        """A row no longer uses its blocks. Registered ones stay cached, the end of a sequence is evicted before its start."""
        self._free += row.copies
        self._free += reversed(row.blocks[row.num_known :])
        now, is_current = self._clock(), row.weights_generation == self.weights_generation
        node = row.node
        while node.parent is not None:
            node.num_rows -= 1
            if not node.num_rows and is_current:
                self._cached[node] = now
                self.num_cached += len(node.blocks)
            elif not node.num_rows:
                self._free += node.blocks
            node = node.parent
        self._evict(self.num_cached - self._max_cached)

    def weights_changed(self) -> None:
        """Forget all registrations. Rows keep their blocks."""
        self.weights_generation += 1
        for node in self._cached:
            self._free += node.blocks
        self._cached.clear()
        self.num_cached = 0
        old = [*self._roots.values()]
        for node in old:
            old.extend(node.children.values())
            # Otherwise parents and children refer to each other, and only the garbage collector frees them.
            node.children = {}
        self._roots = {}

    def _matchable(self, tokens: NDArray[np.int32]) -> int:
        """The bytes of the full blocks, without the last token: its logits must be computed."""
        return (len(tokens) - 1) // self.size * self._block_bytes

    def _enter(self, row: RowBlocks, raw: bytes, end: int) -> list[int]:
        """Continue a row through the nodes that hold its next tokens, `raw[:end]`, as far as there are any. Their blocks."""
        blocks: list[int] = []
        for found, count in self._path(row.node, raw, end):
            node = found
            if count < len(found.blocks):
                node = self._split(found, count)
            elif not found.num_rows:
                del self._cached[found]
            if not node.num_rows:
                self.num_cached -= len(node.blocks)
            node.num_rows += 1
            row.node = node
            row.num_known += len(node.blocks)
            blocks += node.blocks
        return blocks

    def _path(self, node: _Node, raw: bytes, end: int) -> Iterator[tuple[_Node, int]]:
        """The nodes after `node` that hold the next tokens, `raw[:end]`, and how many blocks of each: of the last maybe not all."""
        start = 0
        while start < end and (child := node.children.get(raw[start : start + self._block_bytes])) is not None:
            if not raw.startswith(child.tokens, start, end):
                yield child, self._num_equal(child, raw[start:end])
                return
            yield child, len(child.blocks)
            node = child
            start += len(child.tokens)

    def _num_equal(self, node: _Node, raw: bytes) -> int:
        """Number of blocks at the start of a node that hold the same tokens."""
        size = min(len(node.tokens), len(raw))
        is_other = np.frombuffer(node.tokens[:size], np.int32) != np.frombuffer(raw[:size], np.int32)
        same = int(is_other.argmax()) if is_other.any() else len(is_other)
        return same // self.size

    def _split(self, node: _Node, count: int) -> _Node:
        """Move the first `count` blocks of a node to a new node before it. A row is about to enter it, so it is not cached."""
        size = count * self._block_bytes
        first = _Node(node.tokens[:size], node.blocks[:count], parent=node.parent, num_rows=node.num_rows)
        assert node.parent is not None, "the root is not split"
        node.parent.children[self._key(node)] = first
        node.tokens, node.blocks, node.parent = node.tokens[size:], node.blocks[count:], first
        first.children[self._key(node)] = node
        return first

    def _key(self, node: _Node) -> bytes:
        return node.tokens[: self._block_bytes]

    def _num_evictable(self, *, are_pins_kept: bool) -> int:
        if not are_pins_kept or not self._pin_s:
            return self.num_cached
        oldest = self._oldest_pin()
        return sum(len(node.blocks) for node, released_at in self._cached.items() if released_at <= oldest)

    def _oldest_pin(self) -> float:
        """Nodes that were released later are pinned."""
        return self._clock() - self._pin_s

    def _evict(self, number: int) -> None:
        """Free that many cached blocks: the ends of the nodes that were used least recently."""
        while number > 0:
            node = next(iter(self._cached))
            kept = max(0, len(node.blocks) - number)
            if not kept:
                del self._cached[node]
                assert node.parent is not None, "the root is not cached"
                del node.parent.children[self._key(node)]
            evicted = node.blocks[kept:]
            node.blocks, node.tokens = node.blocks[:kept], node.tokens[: kept * self._block_bytes]
            self._free += evicted
            self.num_cached -= len(evicted)
            number -= len(evicted)
