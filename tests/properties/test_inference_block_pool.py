"""The blocks of the cache under random arrivals, growth, cancellations, preemptions and weight updates.

The machine writes the tokens of every row into the blocks that the pool gave it, as a forward writes keys. No block may be lost,
given to two rows without sharing, or contain anything but the tokens of the rows that use it.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from rollbook.inference.engines.embedded.paged.block_pool import SCRATCH, BlockPool, RowBlocks

SIZE, LIMIT, MAX_CACHED = 2, 14, 6
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(size=SIZE, limit=LIMIT, max_cached=MAX_CACHED, pin_s=2.0, clock=lambda: self.now)
        self.pool.grow(6)
        self.version = 0
        self.content: dict[int, list[tuple[int, int]]] = {}
        """(token, version) of each position of each block."""
        self.rows: list[tuple[list[int], RowBlocks]] = []

    def _array(self, tokens: list[int]) -> NDArray[np.int32]:
        return np.array(tokens, dtype=np.int32)

    def _write(self, tokens: list[int], row: RowBlocks, start: int) -> None:
        for position in range(start, len(tokens)):
            block = self.content.setdefault(row.blocks[position // SIZE], [(-1, -1)] * SIZE)
            block[position % SIZE] = (tokens[position], self.version)

    @rule(tokens=WORDS, are_pins_kept=st.booleans())
    def start_a_row(self, tokens: list[int], are_pins_kept: bool) -> None:
        row = self.pool.match(self._array(tokens))
        reused = row.num_known * SIZE
        assert reused <= max(0, len(tokens) - 1)
        for position in range(reused):
            # What is shared was computed from the same tokens under the current weights.
            assert self.content[row.blocks[position // SIZE]][position % SIZE] == (tokens[position], self.version)
        needed = len(tokens) // SIZE + 1 - len(row.blocks)
        free, cached = self.pool.num_free, self.pool.num_cached
        available = self.pool.num_available(are_pins_kept=are_pins_kept) - (LIMIT - self.pool.capacity)
        blocks = self.pool.allocate(needed, are_pins_kept=are_pins_kept)
        assert (blocks is not None) == (needed <= available)
        if blocks is None:
            assert (self.pool.num_free, self.pool.num_cached) == (free, cached)
            self.pool.release(row.blocks)
            return
        taken = {block for _, other in self.rows for block in other.blocks}
        assert taken.isdisjoint(blocks)
        row.blocks += blocks
        self._write(tokens, row, reused)
        self.pool.register(row, self._array(tokens[row.num_known * SIZE :]))
        self.rows.append((tokens, row))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode_a_token(self, data: st.DataObject, token: int) -> None:
        tokens, row = data.draw(st.sampled_from(self.rows))
        if len(tokens) // SIZE >= len(row.blocks):
            blocks = self.pool.allocate(1)
            if blocks is None:
                return
            row.blocks += blocks
        tokens.append(token)
        self._write(tokens, row, len(tokens) - 1)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), is_finished=st.booleans())
    def end_a_row(self, data: st.DataObject, is_finished: bool) -> None:
        """It is finished and kept for the next turn, or it is cancelled or preempted."""
        index = data.draw(st.integers(0, len(self.rows) - 1))
        tokens, row = self.rows.pop(index)
        if is_finished:
            self.pool.register(row, self._array(tokens[row.num_known * SIZE :]))
        self.pool.release(row.blocks)

    @rule()
    def load_weights(self) -> None:
        self.pool.weights_changed()
        self.version += 1
        assert self.pool.num_cached == 0

    @precondition(lambda self: self.pool.capacity < LIMIT)
    @rule()
    def grow(self) -> None:
        self.pool.grow(min(LIMIT, self.pool.capacity + 3))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_block_is_free_used_or_cached(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_used + pool.num_cached == pool.capacity - 1
        assert pool.num_cached <= MAX_CACHED
        used = {block for _, row in self.rows for block in row.blocks}
        assert pool.num_used == len(used)
        assert SCRATCH not in used

    @invariant()
    def rows_hold_their_own_tokens(self) -> None:
        for tokens, row in self.rows:
            held = [self.content[row.blocks[at // SIZE]][at % SIZE][0] for at in range(len(tokens))]
            assert held == tokens


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40)


def test_the_end_of_a_conversation_is_evicted_before_its_start() -> None:
    pool = BlockPool(size=1, limit=5, max_cached=4)
    pool.grow(5)
    tokens = np.array([1, 2, 3, 4], dtype=np.int32)
    row = pool.match(tokens)
    row.blocks += pool.allocate(4) or []
    pool.register(row, tokens)
    pool.release(row.blocks)
    assert pool.allocate(2) is not None
    assert pool.match(np.array([1, 2, 3, 4, 5], dtype=np.int32)).num_known == 2


def test_siblings_that_start_together_share_the_blocks_of_their_prompt() -> None:
    pool = BlockPool(size=2, limit=20, max_cached=10)
    pool.grow(20)
    tokens = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    first = pool.match(tokens)
    first.blocks += pool.allocate(3) or []
    pool.register(first, tokens)
    second = pool.match(tokens)
    assert second.blocks == first.blocks[:2]
    pool.release(first.blocks)
    # Still used by the second.
    assert pool.num_used == 2
