"""The blocks of the cache under random arrivals, growth, cancellations, preemptions and weight updates.

The machine writes every row into the blocks that the pool gave it, as a forward writes keys, which depend on all tokens so far. No
block may be lost, given to two rows without sharing, or contain anything but the content of the rows that use it.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from rollbook.inference.engines.embedded.paged.block_pool import SCRATCH, BlockPool, RowBlocks

SIZE, LIMIT, MAX_CACHED = 2, 24, 12
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(size=SIZE, limit=LIMIT, max_cached=MAX_CACHED, pin_s=2.0, clock=lambda: self.now)
        self.pool.grow(10)
        self.version = 0
        self.content: dict[int, list[tuple[list[int], int]]] = {}
        """(all tokens up to it, version) of each position of each block."""
        self.rows: list[tuple[list[int], RowBlocks]] = []
        self.ended: list[list[int]] = [[]]
        """The tokens of rows that have ended."""

    def _array(self, tokens: list[int]) -> NDArray[np.int32]:
        return np.array(tokens, dtype=np.int32)

    def _write(self, tokens: list[int], row: RowBlocks, start: int) -> None:
        for position in range(start, len(tokens)):
            block = self.content.setdefault(row.blocks[position // SIZE], [([], -1)] * SIZE)
            block[position % SIZE] = (tokens[: position + 1], self.version)

    @rule(data=st.data(), more=WORDS, are_pins_kept=st.booleans())
    def start_a_row(self, data: st.DataObject, more: list[int], are_pins_kept: bool) -> None:
        """A new conversation, or the next turn of one that has ended."""
        tokens = [*data.draw(st.sampled_from(self.ended)), *more]
        before = self.pool.num_available(are_pins_kept=are_pins_kept)
        held = self.pool.num_held(self._array(tokens), are_pins_kept=are_pins_kept)
        row = self.pool.match(self._array(tokens))
        # What a match takes from the available blocks.
        assert before - self.pool.num_available(are_pins_kept=are_pins_kept) == row.num_known - held
        reused = row.num_known * SIZE
        assert reused <= max(0, len(tokens) - 1)
        for position in range(reused):
            # What is shared was computed from the same tokens under the current weights.
            expected = (tokens[: position + 1], self.version)
            assert self.content[row.blocks[position // SIZE]][position % SIZE] == expected
        needed = len(tokens) // SIZE + 1 - len(row.blocks)
        free, cached = self.pool.num_free, self.pool.num_cached
        available = self.pool.num_available(are_pins_kept=are_pins_kept) - (LIMIT - self.pool.capacity)
        blocks = self.pool.allocate(needed, are_pins_kept=are_pins_kept)
        assert (blocks is not None) == (needed <= available)
        if blocks is None:
            assert (self.pool.num_free, self.pool.num_cached) == (free, cached)
            self.pool.release(row)
            return
        taken = {block for _, other in self.rows for block in other.blocks}
        assert taken.isdisjoint(blocks)
        row.blocks += blocks
        self._write(tokens, row, reused)
        self.pool.register(row, self._array(tokens[row.num_known * SIZE :]))
        self.rows.append((tokens, row))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=WORDS)
    def decode_tokens(self, data: st.DataObject, more: list[int]) -> None:
        tokens, row = data.draw(st.sampled_from(self.rows))
        for token in more:
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
        self.pool.release(row)
        self.ended = [[], *self.ended[-3:], tokens]

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
        used = {block for _, row in self.rows for block in (*row.blocks, *_registered(row))}
        assert pool.num_used == len(used)
        assert SCRATCH not in used

    @invariant()
    def rows_hold_their_own_tokens(self) -> None:
        for tokens, row in self.rows:
            held = [self.content[row.blocks[at // SIZE]][at % SIZE][0] for at in range(len(tokens))]
            assert held == [tokens[: at + 1] for at in range(len(tokens))]


def _registered(row: RowBlocks) -> list[int]:
    """The shared blocks with the content of a row. It has copies of some of them, if another row registered them first."""
    blocks: list[int] = []
    node = row.node
    while node.parent is not None:
        blocks += node.blocks
        node = node.parent
    return blocks


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40)


def started(pool: BlockPool, *tokens: int) -> RowBlocks:
    """A row that has prefilled a prompt."""
    row = pool.match(np.array(tokens, dtype=np.int32))
    row.blocks += pool.allocate(-(-len(tokens) // pool.size) - len(row.blocks)) or []
    pool.register(row, np.array(tokens[row.num_known * pool.size :], dtype=np.int32))
    return row


def decoded(pool: BlockPool, row: RowBlocks, *tokens: int) -> None:
    """With blocks of one token."""
    row.blocks += pool.allocate(len(tokens)) or []
    pool.register(row, np.array(tokens, dtype=np.int32))


def num_known(pool: BlockPool, *tokens: int) -> int:
    """How many blocks a prompt finds."""
    row = pool.match(np.array(tokens, dtype=np.int32))
    pool.release(row)
    return row.num_known


def tokens_pool(capacity: int = 20, *, max_cached: int = 20, **settings: Any) -> BlockPool:
    """With blocks of one token."""
    pool = BlockPool(size=1, limit=capacity, max_cached=max_cached, **settings)
    pool.grow(capacity)
    return pool


def test_the_end_of_a_conversation_is_evicted_before_its_start() -> None:
    pool = tokens_pool(5)
    pool.release(started(pool, 1, 2, 3, 4))
    assert pool.allocate(2) is not None
    assert num_known(pool, 1, 2, 3, 4, 5) == 2


def test_a_conversation_whose_end_was_evicted_can_continue() -> None:
    pool = tokens_pool(max_cached=2)
    pool.release(started(pool, 1, 2, 3, 4))
    assert num_known(pool, 1, 2, 3, 4, 0) == 2
    started(pool, 1, 2, 3, 4, 7)
    started(pool, 1, 2, 9)
    assert num_known(pool, 1, 2, 3, 4, 7, 0) == 5
    assert num_known(pool, 1, 2, 9, 0) == 3


def test_rows_with_the_same_prompt_continue_separately() -> None:
    pool = tokens_pool()
    first, second = started(pool, 1, 2), started(pool, 1, 2, 5)
    decoded(pool, first, 7)
    assert num_known(pool, 1, 2, 5, 7, 0) == 3
    assert num_known(pool, 1, 2, 7, 0) == 3
    pool.release(second)
    decoded(pool, first, 8)
    assert num_known(pool, 1, 2, 7, 8, 0) == 4
    assert num_known(pool, 1, 2, 5, 0) == 3


def test_a_row_continues_beside_an_ended_conversation_with_the_same_start() -> None:
    pool = tokens_pool()
    first, second = started(pool, 1, 2), started(pool, 1, 2, 5)
    pool.release(second)
    decoded(pool, first, 7)
    assert num_known(pool, 1, 2, 7, 5, 0) == 3
    assert num_known(pool, 1, 2, 5, 0) == 3


def test_siblings_that_start_together_share_the_blocks_of_their_prompt() -> None:
    pool = BlockPool(size=2, limit=20, max_cached=10)
    pool.grow(20)
    first, second = started(pool, 1, 2, 3, 4, 5), pool.match(np.array([1, 2, 3, 4, 5], dtype=np.int32))
    assert second.blocks == first.blocks[:2]
    pool.release(first)
    # Still used by the second.
    assert pool.num_used == 2


def test_conversations_that_ended_a_moment_ago_are_not_evicted_by_new_requests() -> None:
    now = 0.0
    pool = tokens_pool(5, pin_s=2.0, clock=lambda: now)
    pool.release(started(pool, 1, 2, 3))
    now = 1.9
    assert pool.allocate(2, are_pins_kept=True) is None
    assert pool.num_available(are_pins_kept=True) == 1
    now = 2.0
    assert pool.allocate(2, are_pins_kept=True) is not None
