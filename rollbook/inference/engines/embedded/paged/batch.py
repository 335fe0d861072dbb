"""Runs rounds over cache blocks, for a GPU: one forward decodes all running rows and prefills pieces of new prompts.

A row gets blocks for its prompt when its prefill starts, and one more whenever it has filled its last. Prompts that start with the
same tokens share blocks, even with rows of the same forward: each layer writes all keys before any token reads them.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.contracts.errors import is_out_of_memory
from rollbook.inference.engines.embedded.paged.block_pool import SCRATCH, BlockPool, RowBlocks
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from rollbook.inference.engines.embedded.paged.step_input import PromptSlice
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import PendingResults
from rollbook.inference.request import GenerationRequest, token_array

GATHER_ROUNDS, GATHER_PROMPTS = 4, 16
"""While others decode, new prompts wait for at most this many rounds, or until there are this many of them."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prefill:
    """A request that owns a row and is not decoded yet. It has blocks and an array of tokens once its prefill has started."""

    request: GenerationRequest
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    done: int = 0


class PagedBatch:
    """The requests that share the blocks. Implements `scheduler.RunningBatch`. A request's `cached_kv` is its `RowBlocks`."""

    def __init__(
        self,
        runner: PackedRunner,
        pool: BlockPool,
        *,
        max_rows: int,
        prompt_tokens: int,
        step_tokens: int,
    ) -> None:
        """`prompt_tokens`: maximum number of prompt tokens in a round. `step_tokens`: of all tokens. First, `grow` it."""
        self.table = RowTable(max_rows)
        self.pool = pool
        self.cached_tokens = 0
        self._runner = runner
        self._cache = runner.cache
        self._prompt_tokens, self._step_tokens = prompt_tokens, step_tokens
        self._room = np.zeros(max_rows, dtype=np.int32)
        """The number of tokens that the blocks of each row hold."""
        self._prefills: list[_Prefill] = []
        self._rounds_waited = 0
        self._least = self._cache.tables_SP.shape[1] + 1
        """Blocks that the longest sequence needs, scratch included."""

    def num_admissible(self, waiting: Iterable[GenerationRequest]) -> int:
        running = self.table.num_owned
        free_rows = self.table.max_rows - running
        reserved = sum(self._needed(_length(p.request)) for p in self._prefills if p.request.cached_kv is None)
        # One block is left for each running row, so that it is not preempted soon.
        available = self.pool.num_available(are_pins_kept=running > 0) - reserved - running
        admitted = 0
        for request in islice(waiting, free_rows):
            # The next turn of a pinned conversation does not wait for its own blocks.
            held = self.pool.num_held(_tokens(request), adapter=request.adapter, are_pins_kept=running > 0)
            available -= self._needed(_length(request)) - held + 1
            if available < 0 and running + admitted > 0:
                break
            admitted += 1
        return admitted

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._prefills.extend(map(_Prefill, requests))

    def launch(self, number: int) -> tuple[NDArray[np.int64], list[int]]:
        table = self.table
        lines = table.lines()
        decoding = lines.rows[lines.offsets == 0]
        pieces = self._pieces(len(lines.rows))
        if len(decoding) or pieces:
            self._runner.run(table, lines, pieces)
        table.positions[decoding] += 1
        table.counts[decoding] += 1
        started = [piece.row for piece in pieces if piece.is_last]
        for piece in pieces:
            table.positions[piece.row] = piece.start + len(piece.tokens)
        table.counts[started] += 1
        table.is_active[started] = True
        if started:
            self._prefills = [prefill for prefill in self._prefills if prefill.done < _length(prefill.request)]
        return decoding, started

    def collect(self) -> PendingResults:
        return self._runner.collect(has_tops=self.table.has_tops)

    def retire(self, request: GenerationRequest) -> None:
        """Nothing to do: the blocks belong to the request, not to its row."""

    def keep(self, request: GenerationRequest) -> None:
        row: RowBlocks | None = request.cached_kv
        if row is not None:
            # Without the last token, whose keys were never written.
            start = row.num_known * self.pool.size - len(request.prompt)
            new = token_array(request.tokens[max(0, start) : -1])
            self.pool.register(row, new if start >= 0 else np.concatenate([request.prompt[start:], new]))
            request.routes = self._cache.read_routes(row.blocks, len(request.prompt) + len(request.tokens) - 1)

    def remove(self, request: GenerationRequest) -> None:
        if request.cached_kv is not None:
            self.pool.release(request.cached_kv)
            request.cached_kv = None
        if any(prefill.request is request for prefill in self._prefills):
            self._prefills = [prefill for prefill in self._prefills if prefill.request is not request]

    def clean(self, row: int) -> None:
        """Nothing to do: attention reads no position that the row has not written."""

    def to_preempt(self) -> list[GenerationRequest]:
        """Grows the cache first, if it can."""
        number = len(self._full_rows())
        self._ensure_free(number)
        if number <= self.pool.num_available():
            return []
        with_blocks = [request for request in self.table.requests() if request.cached_kv is not None]
        return [max(with_blocks, key=lambda request: request.order)]

    def make_space(self, number: int) -> None:
        """Give each row that has filled its blocks another one."""
        self._add_blocks(self._full_rows())
        if self.table.is_drafting:
            self._make_space_for_drafts()

    def _make_space_for_drafts(self) -> None:
        """Drafts get free blocks only: nothing is evicted or preempted for them. They are cut where there is none."""
        table = self.table
        drafted: list[GenerationRequest] = [r for r in table.owners[table.is_active] if r.draft]
        past = [r.row for r in drafted if table.positions[r.row] + len(r.draft) >= self._room[r.row]]
        self._add_blocks(np.array(past[: self.pool.num_free], dtype=np.int64))
        for request in drafted:
            room = int(self._room[request.row] - table.positions[request.row]) - 1
            request.draft = request.draft[:room]

    def _add_blocks(self, rows: NDArray[np.int64]) -> None:
        """One more for each row."""
        if not len(rows):
            return
        blocks = self.pool.allocate(len(rows))
        assert blocks is not None, "`to_preempt` has made sure that there are enough"
        self._cache.set_blocks(rows, self._room[rows].astype(np.int64) // self.pool.size, np.array(blocks))
        self._room[rows] += self.pool.size
        for request, block in zip(self.table.owners[rows], blocks, strict=True):
            request.cached_kv.blocks.append(block)

    def shrink(self) -> bool:
        """Half of the blocks, but never fewer than the longest sequence needs. If there is no memory for those either, the next
        request allocates them."""
        self.pool.weights_changed()
        self._runner.forget_graphs()
        while (num_blocks := max(self._least, self.pool.capacity // 2)) < self.pool.capacity:
            self.pool.shrink(num_blocks)
            try:
                self._cache.replace(num_blocks)
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if num_blocks == self._least:
                    self.pool.shrink(SCRATCH + 1)
                    self.pool.limit = self._least
        return False

    def weights_changed(self) -> None:
        self.pool.weights_changed()
        # Prompts that are prefilled in part start again. So the keys that a first token reads are of one version: its own.
        for prefill in self._prefills:
            if (row := prefill.request.cached_kv) is not None:
                self.pool.release(row)
                prefill.request.cached_kv = None

    def recompute(self, decoding: Sequence[GenerationRequest]) -> None:
        """Every row starts again: its tokens so far are prefilled in the next rounds, and its next token is sampled after them."""
        running = sorted(self.table.requests(), key=lambda request: request.order)
        for request in running:
            if request.cached_kv is not None:
                self.pool.release(request.cached_kv)
                request.cached_kv = None
            request.segments = []
            self.table.is_active[request.row] = False
            self.table.positions[request.row] = 0
        self._prefills = [_Prefill(request) for request in running]

    def invalidate(self) -> None:
        self.pool.weights_changed()

    # --- blocks ---

    def _needed(self, tokens: int) -> int:
        """Blocks for that many tokens and the one that is sampled next."""
        return tokens // self.pool.size + 1

    def _full_rows(self) -> NDArray[np.int64]:
        """The decoding rows whose next token needs a new block."""
        table = self.table
        return np.flatnonzero(table.is_active & (table.positions >= self._room))

    def _pieces(self, num_decoding: int) -> list[PromptSlice]:
        """The prompt tokens of this round, in order of arrival."""
        pieces: list[PromptSlice] = []
        if not self._prefills or (num_decoding and not self._is_gathered()):
            return pieces
        left = max(1, min(self._prompt_tokens, self._step_tokens - num_decoding))
        for prefill in self._prefills:
            request = prefill.request
            if not left or (request.cached_kv is None and not self._start(prefill)):
                break
            end = min(len(prefill.tokens), prefill.done + left)
            is_last = end == len(prefill.tokens)
            pieces.append(PromptSlice(request.row, prefill.done, prefill.tokens[prefill.done : end], is_last))
            left -= end - prefill.done
            prefill.done = end
            row: RowBlocks = request.cached_kv
            self.pool.register(row, prefill.tokens[row.num_known * self.pool.size : end])
        return pieces

    def _is_gathered(self) -> bool:
        """Whether to prefill in this round. A step with prompts costs almost the same for one prompt as for several, so new prompts
        wait a few rounds for others."""
        self._rounds_waited += 1
        is_worth = self._rounds_waited >= GATHER_ROUNDS or len(self._prefills) >= GATHER_PROMPTS
        if is_worth or self._prefills[0].done:
            self._rounds_waited = 0
            return True
        return False

    def _start(self, prefill: _Prefill) -> bool:
        """Give a row its blocks: first those that others computed, then new ones. False if there are not enough."""
        request, pool = prefill.request, self.pool
        prefill.tokens = _tokens(request)
        row: RowBlocks = pool.match(prefill.tokens, adapter=request.adapter)
        needed = self._needed(len(prefill.tokens)) - len(row.blocks)
        are_pins_kept = bool(self.table.is_active.any())
        self._ensure_free(needed, are_pins_kept=are_pins_kept)
        blocks = pool.allocate(needed, are_pins_kept=are_pins_kept)
        if blocks is None:
            pool.release(row)
            return False
        row.blocks += blocks
        request.cached_kv = row
        prefill.done = row.num_known * pool.size
        if not request.tokens:
            # A preempted request may find its own blocks again: they are not counted.
            # Prefill may start again after an update. A counter must not fall.
            self.cached_tokens += max(0, prefill.done - request.cached_tokens)
            request.cached_tokens = prefill.done
        self._room[request.row] = len(row.blocks) * pool.size
        self._cache.set_row(request.row, row.blocks)
        return True

    def _ensure_free(self, number: int, *, are_pins_kept: bool = False) -> None:
        """Grow the cache, within its limit, if rows use more than half of it or too little can be evicted. Otherwise cached blocks
        are evicted.

        Growing is expensive: it copies all blocks, and steps are captured again.
        """
        pool = self.pool
        if pool.num_free >= number or pool.capacity == pool.limit:
            return
        without_growth = pool.num_available(are_pins_kept=are_pins_kept) - (pool.limit - pool.capacity)
        if 2 * (pool.num_used + number) <= pool.capacity and number <= without_growth:
            return
        if not self.grow(min(pool.limit, max(2 * pool.capacity, pool.capacity + number, self._least))):
            if pool.capacity < self._least:
                raise torch.OutOfMemoryError(
                    f"the device has no memory for the {self._least} cache blocks of one sequence"
                )
            log.warning(
                "the device has no memory for more than %d cache blocks of %d tokens; from now on requests wait instead, or the "
                "youngest are preempted. Set inference.kv_memory_mb to reserve memory",
                pool.capacity,
                pool.size,
            )
            pool.limit = pool.capacity

    def grow(self, num_blocks: int) -> bool:
        """Grow the cache to `num_blocks`. False, and no change, if the device has not enough memory."""
        try:
            with torch.inference_mode():
                self._cache.resize(num_blocks)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        self.pool.grow(num_blocks)
        return True


def _length(request: GenerationRequest) -> int:
    return len(request.prompt) + len(request.tokens)


def _tokens(request: GenerationRequest) -> NDArray[np.int32]:
    return np.concatenate([request.prompt, token_array(request.tokens)]) if request.tokens else request.prompt
