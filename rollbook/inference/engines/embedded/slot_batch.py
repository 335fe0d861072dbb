"""Runs rounds over slots: on a CPU, and on any device for models that use their Hugging Face module.

A round is one forward that decodes all running rows, and forwards that prefill new ones.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.inference.engines.batching import SlotBudget, compaction, excess, joinable
from rollbook.inference.engines.embedded.prefill import Prefiller
from rollbook.inference.engines.embedded.prefix_cache import PrefixCache
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import PendingResults, Runner
from rollbook.inference.request import GenerationRequest


class SlotBatch:
    """The requests that share the slots. Implements `scheduler.RunningBatch`."""

    def __init__(
        self,
        runner: Runner,
        *,
        budget: SlotBudget,
        round_tokens: int,
        forward_tokens: int,
        memo_rows: int = 0,
        prefix_tokens: int = 0,
        min_prefix: int = 1,
        has_routes: bool = False,
    ) -> None:
        """`round_tokens`: maximum number of prompt tokens prefilled in a round. `forward_tokens`: of one forward, with padding.
        `has_routes`: the chosen experts are recorded."""
        self.table = RowTable(budget.max_rows)
        self.prefixes = PrefixCache(
            runner.slots, max_tokens=prefix_tokens, min_length=min_prefix, row_tokens=budget.row_tokens
        )
        self._runner = runner
        self._budget = budget
        self._round_tokens = round_tokens
        self._capacity = SlotCapacity(runner, self.table, budget)
        self._prefiller = Prefiller(
            runner,
            self.table,
            round_tokens=round_tokens,
            forward_tokens=forward_tokens,
            memo_rows=memo_rows,
            prefixes=self.prefixes,
            copies_all=has_routes,
        )
        with torch.inference_mode():
            self._capacity.fit(1, round_number=0)

    @property
    def cached_tokens(self) -> int:
        return self.prefixes.cached_tokens

    def num_admissible(self, waiting: Iterable[GenerationRequest]) -> int:
        return joinable(
            (len(request.prompt) + len(request.tokens) + 1 for request in waiting),
            running=self.table.num_owned,
            longest=self._longest(),
            budget=self._budget,
            max_tokens=self._round_tokens,
            free_slots=self._budget.max_rows - self.table.num_owned,
        )

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            request.weights_generation = self.prefixes.weights_generation
        self._prefiller.add(requests)

    def launch(self, number: int) -> tuple[NDArray[np.int64], list[int]]:
        table = self.table
        rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        is_decoding = table.is_active.any()
        extent = self._capacity.compact(number) if is_decoding else 0
        self._runner.masks = table.masks()
        if is_decoding:
            lines = table.lines()
            rows = lines.rows[lines.offsets == 0]
            if lines.depth > 1:
                self._runner.decode_lines(table, lines)
            else:
                if lines.tokens is not None:
                    self._runner.set_tokens(lines.rows, lines.tokens)
                self._runner.decode(table, extent, length=int(table.positions[:extent].max()) + 1)
            table.positions[rows] += 1
            table.counts[rows] += 1
        return rows, self._prefiller.round() if self._prefiller.has_work else []

    def collect(self) -> PendingResults:
        return self._runner.collect(has_tops=self.table.has_tops)

    def retire(self, request: GenerationRequest) -> None:
        # Copied now, because the row's next owner may be launched before this round is processed.
        row = request.row
        request.routes = self._runner.slots.read_routes(row, int(self.table.positions[row]))
        request.cached_kv = self.prefixes.copy_out(
            row, int(self.table.positions[row]), weights_generation=request.weights_generation
        )
        self._runner.slots.release(row)

    def keep(self, request: GenerationRequest) -> None:
        generation = request.weights_generation
        length = len(request.prompt) + len(request.tokens) - 1
        has_row = self.table.owners[request.row] is request
        # Steps that were launched ahead have continued the row after its stop token. A state cannot go back to it.
        is_continued = (
            len(request.tokens) < request.limit if not has_row else length < self.table.positions[request.row]
        )
        can_copy = self._runner.slots.is_croppable or not is_continued
        if has_row:
            request.routes = self._runner.slots.read_routes(request.row, length)
        elif request.routes is not None:
            # A stop token was sampled before the limit, after which its row was freed.
            request.routes = request.routes[:length]
        if not can_copy:
            request.cached_kv = None
        elif request.cached_kv is None and has_row:
            request.cached_kv = self.prefixes.copy_out(request.row, length, weights_generation=generation)
        if request.cached_kv is not None:
            tokens = [*request.prompt.tolist(), *request.tokens[:-1]]
            self.prefixes.add(tokens, request.cached_kv, weights_generation=generation, adapter=request.adapter)

    def remove(self, request: GenerationRequest) -> None:
        request.cached_kv = None
        self._prefiller.remove(request)
        if request.row >= 0 and self.table.owners[request.row] is request:
            self._runner.slots.release(request.row)

    def clean(self, row: int) -> None:
        self._runner.slots.zero_rows([row])

    def to_preempt(self) -> list[GenerationRequest]:
        return self._capacity.to_preempt(self._longest())

    def make_space(self, number: int) -> None:
        self._capacity.fit(self._longest(), round_number=number)
        if self.table.is_drafting:
            # Slots do not grow for them.
            for request in self.table.owners[self.table.is_active]:
                room = self._runner.slots.length - int(self.table.positions[request.row]) - 1
                request.draft = request.draft[:room]

    def shrink(self) -> bool:
        return False

    def weights_changed(self) -> None:
        self._prefiller.weights_changed()
        self.prefixes.weights_changed()

    def recompute(self, decoding: Sequence[GenerationRequest]) -> None:
        # Without the last token: its keys are written by the decode step that consumes it.
        self._prefiller.recompute([(r, [*r.prompt.tolist(), *r.tokens[:-1]]) for r in decoding])
        self._prefiller.restart()
        for request in self.table.requests():
            request.weights_generation = self.prefixes.weights_generation

    def invalidate(self) -> None:
        """Nothing to do: prefixes are copied after their keys were computed."""

    def _longest(self) -> int:
        """Positions that the longest row needs in the next round."""
        active = self.table.positions[self.table.is_active]
        return max(self._prefiller.longest, int(active.max()) + 1 if len(active) else 1)


class SlotCapacity:
    """Sets the number and length of the slots: grows them on demand within the budget, and closes gaps between rows."""

    def __init__(self, runner: Runner, table: RowTable, budget: SlotBudget) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._table = table
        self._budget = budget

    def to_preempt(self, longest: int) -> list[GenerationRequest]:
        """The youngest requests that must leave before the longest row can grow to `longest` positions."""
        over = excess(running=self._table.num_owned, longest=longest, budget=self._budget)
        if not over:
            return []
        return sorted(self._table.requests(), key=lambda request: request.order)[-over:]

    def fit(self, length: int, *, round_number: int) -> None:
        """Grow the slots if they are too few or too short. If memory is short, rows take precedence over spare length."""
        budget, slots = self._budget, self._slots
        rows = self._table.extent
        if rows <= slots.rows and length <= slots.length:
            return
        if rows > budget.rows_for(length):
            self.compact(round_number, is_forced=True)
            rows = self._table.num_owned
        # In large steps, because growing copies everything.
        new_length = budget.length_for(slots.length if length <= slots.length else max(length, slots.length * 5 // 4))
        if budget.rows_for(new_length) < max(rows, 1):
            new_length = budget.length_for(length)
        new_rows = max(rows, 1, slots.rows if rows <= slots.rows else 2 * slots.rows)
        slots.resize(min(new_rows, budget.rows_for(new_length)), new_length)

    def compact(self, round_number: int, *, is_forced: bool = False) -> int:
        """Close gaps between rows if that makes the step smaller. Returns the number of rows a decode step must cover."""
        table = self._table
        extent = table.extent
        if extent == table.num_owned or not (is_forced or self._runner.is_smaller(table.num_owned, extent)):
            return extent
        moves = compaction(table.is_owned(extent))
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        length = min(self._slots.length, int(table.positions[sources].max()) + 1)
        self._slots.copy_rows(sources, targets, length=length)
        self._runner.move_tokens(sources, targets)
        for source, target in moves:
            request: GenerationRequest = table.owners[source]
            if request.segments:
                request.segments = [
                    *request.segments[:-1],
                    (*request.segments[-1][:2], round_number),
                    (target, round_number, None),
                ]
            table.move(source, target)
            self._slots.release(source)
        return table.extent
