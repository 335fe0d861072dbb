"""Runs the rounds of the embedded engine: decode all running rows, prefill new ones, and process what earlier rounds sampled.

Used by the engine's thread only. Up to `ahead` rounds are launched before the host reads the tokens of the oldest. A row that
reaches its limit is freed at launch. A row that sampled a stop token is noticed later; tokens after the stop token are dropped.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.contracts.policy import FinishReason
from rollbook.inference.engine import GenerationError
from rollbook.inference.engines.batching import LENGTH_STEP, SlotBudget, compaction, excess, joinable
from rollbook.inference.engines.embedded.prefill import Prefiller
from rollbook.inference.engines.embedded.prefix_cache import PrefixCache
from rollbook.inference.engines.embedded.row_table import RoundLog, RowTable
from rollbook.inference.engines.embedded.runner import PendingResults, Runner
from rollbook.inference.request import Request

LOG_ROUNDS = 4096


@dataclass(slots=True)
class RoundResults:
    """What the processed rounds produced."""

    done: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    streamed: list[Request] = field(default_factory=list)
    """Streaming requests with new tokens."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRound:
    """A round whose results were not processed yet."""

    number: int
    results: PendingResults
    publication: int
    rows: NDArray[np.int64]
    owners: NDArray[np.object_]
    stops: NDArray[np.int32] | None
    is_constrained: NDArray[np.bool_]
    ending: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    round_tokens: int
    """Maximum number of prompt tokens prefilled in a round."""
    forward_tokens: int
    """Maximum number of tokens in one forward, padding included."""
    ahead: int
    """Number of rounds launched before the host waits for the oldest."""


class Scheduler:
    """Requests enter by `join` and leave by `round` or `drain`."""

    def __init__(
        self,
        runner: Runner,
        *,
        budget: SlotBudget,
        limits: StepLimits,
        memo_rows: int = 0,
        prefix_tokens: int = 0,
        min_prefix: int = 1,
        min_rows: int = 1,
        min_length: int = LENGTH_STEP,
    ) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._budget = budget
        self._limits = limits
        self.table = RowTable(budget.max_rows)
        self._capacity = SlotCapacity(runner, self.table, budget, min_rows=min_rows, min_length=min_length)
        self.prefixes = PrefixCache(runner.slots, max_tokens=prefix_tokens, min_length=min_prefix)
        self._prefiller = Prefiller(
            runner,
            self.table,
            round_tokens=limits.round_tokens,
            forward_tokens=limits.forward_tokens,
            memo_rows=memo_rows,
            prefixes=self.prefixes,
        )
        self._log = RoundLog(budget.max_rows, min(LOG_ROUNDS, 2 * budget.max_length + 2 * limits.ahead + 2))
        self._launched: deque[LaunchedRound] = deque()
        self._streaming: list[Request] = []
        self._number = 0
        self._dropped_until = -1
        self.preemptions = 0
        self._preempted: list[Request] = []
        with torch.inference_mode():
            self._capacity.fit(1, round_number=0)

    @property
    def num_running(self) -> int:
        return self.table.num_owned

    @property
    def has_launched(self) -> bool:
        """Whether launched rounds are still to be processed."""
        return bool(self._launched)

    def num_admissible(self, lengths: Iterable[int]) -> int:
        """How many of the waiting requests, in order, can join now."""
        return joinable(
            lengths,
            running=self.num_running,
            longest=self._longest(),
            budget=self._budget,
            max_tokens=self._limits.round_tokens,
            free_slots=self._budget.max_rows - self.num_running,
        )

    def join(self, requests: Sequence[Request]) -> None:
        """Give each request a row. Limited by `num_admissible`."""
        rows = self.table.free_rows(len(requests))
        for request, row in zip(requests, rows, strict=True):
            self.table.occupy(row, request)
            request.weights_generation = self.prefixes.weights_generation
            if request.on_tokens is not None:
                self._streaming.append(request)
        self._prefiller.add(requests)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Free the rows of cancelled requests and drop their pending tokens."""
        for request in requests:
            if not request.is_finished:
                self._release(request)

    def round(self, publication: int, results: RoundResults) -> None:
        """Launch one round under the weights of `publication`. Adds to `results`, also when it raises."""
        with torch.inference_mode():
            self._make_space(results)
            if self.table.is_constrained.any():
                self._update_masks(results)
            self._launch(publication)
            while len(self._launched) > self._limits.ahead or (self._launched and not self.num_running):
                self._process(self._launched.popleft(), results)

    def take_preempted(self) -> list[Request]:
        """The requests preempted since the last call, in order of arrival. They keep their tokens and must join again."""
        preempted, self._preempted = self._preempted, []
        return sorted(preempted, key=lambda request: request.order)

    def drain(self) -> RoundResults:
        """Wait for all launched rounds."""
        results = RoundResults()
        with torch.inference_mode():
            self._process_launched(results)
        return results

    def clear(self) -> list[Request]:
        """Remove all requests. They keep the tokens processed so far; call `drain` first to keep all of them."""
        # Requests that have launched all their tokens have left their rows, but are not finished.
        ending = [request for launched in self._launched for request in launched.ending if not request.is_finished]
        requests = [*ending, *self.table.requests()]
        for request in requests:
            self._log.flush(request, self._processed_until())
            self._release(request)
        self._launched.clear()
        return requests

    def weights_changed(self) -> None:
        self._prefiller.weights_changed()
        self.prefixes.weights_changed()

    def recompute(self, results: RoundResults) -> None:
        """Recompute the keys and values of every row under the current weights."""
        with torch.inference_mode():
            self._process_launched(results)
            decoding: list[Request] = self.table.owners[self.table.is_active].tolist()
            for request in decoding:
                self._log.flush(request, self._processed_until())
            # Without the last token: its keys are written by the decode step that consumes it.
            self._prefiller.recompute([(r, [*r.prompt, *r.tokens[:-1]]) for r in decoding])
            self._prefiller.restart()
            for request in self.table.requests():
                request.weights_generation = self.prefixes.weights_generation

    # --- launching a round ---

    def _launch(self, publication: int) -> None:
        table = self.table
        rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        is_decoding = table.is_active.any()
        extent = self._capacity.compact(self._number) if is_decoding else 0
        self._runner.masks = self._masks()
        if is_decoding:
            table.prepare()
            rows = np.flatnonzero(table.is_active)
            self._runner.decode(table, extent, length=int(table.positions[:extent].max()) + 1)
            table.positions[rows] += 1
            table.counts[rows] += 1
        started = self._prefiller.round() if self._prefiller.has_work else []
        if started:
            rows = np.concatenate([rows, np.array(started, dtype=np.int64)])
        owners = table.owners[rows]
        stops = table.stops[rows] if table.has_stops else None
        is_constrained = table.is_constrained[rows]
        for row in started:
            table.owners[row].start()
            table.owners[row].segments.append((row, self._number, None))
        ending = self._retire(rows)
        self._launched.append(
            LaunchedRound(
                number=self._number,
                results=self._runner.collect(has_tops=table.has_tops),
                publication=publication,
                rows=rows,
                owners=owners,
                stops=stops,
                is_constrained=is_constrained,
                ending=ending,
            )
        )
        self._number += 1

    def _update_masks(self, results: RoundResults) -> None:
        """A mask depends on all tokens before it, so rounds are not launched ahead of a constrained row."""
        self._process_launched(results)
        for request in self.table.owners[self.table.is_constrained].tolist():
            try:
                request.update_mask()
            except GenerationError as error:
                results.failed.append((request, error))
                self._release(request)

    def _masks(self) -> dict[int, NDArray[np.uint8]]:
        rows: list[int] = np.flatnonzero(self.table.is_constrained).tolist()
        return {row: self.table.owners[row].mask for row in rows}

    def _retire(self, rows: NDArray[np.int64]) -> list[Request]:
        """Free the rows that have launched all their tokens."""
        table = self.table
        ended: list[int] = rows[table.counts[rows] >= table.limits[rows]].tolist()
        ending: list[Request] = []
        for row in ended:
            request: Request = table.owners[row]
            request.segments = [*request.segments[:-1], (*request.segments[-1][:2], self._number + 1)]
            ending.append(request)
            # Copied now, because the row's next owner may be launched before this round is processed.
            request.cached_kv = self.prefixes.copy_out(
                row, int(table.positions[row]), weights_generation=request.weights_generation
            )
            table.release(row)
        return ending

    # --- processing a launched round ---

    def _process_launched(self, results: RoundResults) -> None:
        while self._launched:
            self._process(self._launched.popleft(), results)

    def _process(self, launched: LaunchedRound, results: RoundResults) -> None:
        tokens_S, logprobs_S = launched.results.wait()
        self._log.write(launched.number, tokens_S, logprobs_S, launched.publication, launched.results.tops())
        until = launched.number + 1
        results.tokens += len(launched.rows)
        if launched.number <= self._dropped_until:
            results.tokens -= sum(request.is_finished for request in launched.owners)
        is_broken = np.isnan(logprobs_S[launched.rows])
        if is_broken.any():
            self._fail(launched, is_broken, results)
        for request, token in zip(
            launched.owners[launched.is_constrained],
            tokens_S[launched.rows[launched.is_constrained]].tolist(),
            strict=True,
        ):
            request.accept(token)
        if launched.stops is not None:
            is_stopped = (tokens_S[launched.rows, None] == launched.stops).any(axis=1)
            for request in launched.owners[is_stopped]:
                if not request.is_finished:
                    self._finish(request, until, FinishReason.STOP, results)
        for request in launched.ending:
            if not request.is_finished:
                self._finish(request, until, FinishReason.LENGTH, results)
        if self._streaming:
            self._streaming = [request for request in self._streaming if not request.is_finished]
            for request in self._streaming:
                self._log.flush(request, until)
            results.streamed.extend(self._streaming)
        if until % max(1, self._log.capacity // 2) == 0:
            for request in self.table.requests():
                self._log.flush(request, until)

    def _finish(self, request: Request, until: int, reason: FinishReason, results: RoundResults) -> None:
        self._log.flush(request, until)
        self._cache_prefix(request)
        self._release(request)
        if request.on_tokens is not None:
            results.streamed.append(request)
        results.done.append((request, reason))

    def _cache_prefix(self, request: Request) -> None:
        """Cache the request's keys and values for a prompt that continues it. The last token's keys were never written."""
        generation = request.weights_generation
        if request.cached_kv is None and self.table.owners[request.row] is request:
            length = len(request.prompt) + len(request.tokens) - 1
            request.cached_kv = self.prefixes.copy_out(request.row, length, weights_generation=generation)
        if request.cached_kv is not None:
            tokens = [*request.prompt, *request.tokens[:-1]]
            self.prefixes.add(tokens, request.cached_kv, weights_generation=generation)
            request.cached_kv = None

    def _fail(self, launched: LaunchedRound, is_broken: NDArray[np.bool_], results: RoundResults) -> None:
        broken = [request for request in launched.owners[is_broken] if not request.is_finished]
        results.tokens -= int(is_broken.sum())
        for request in broken:
            self._log.flush(request, launched.number)
            row = request.row
            position = len(request.prompt) + len(request.tokens)
            error = GenerationError(
                f"publication {launched.publication} gave logits that are not numbers at position {position}; this request failed, "
                "others continue. The weights have probably diverged"
            )
            results.failed.append((request, error))
            self._release(request)
            if self.table.owners[row] is None:
                # NaN must not stay in a slot: even a masked position would spoil the row's next owner.
                self._slots.zero_rows([row])

    def _release(self, request: Request) -> None:
        """Remove a request. Frees its row, unless it has left it already."""
        request.is_finished = True
        request.segments = []
        if request.row >= 0 and self.table.owners[request.row] is request:
            # Tokens that are already launched for it are not counted.
            self._dropped_until = self._number
            self.table.release(request.row)
        self._prefiller.remove(request)

    def _processed_until(self) -> int:
        return self._launched[0].number if self._launched else self._number

    # --- memory ---

    def _longest(self) -> int:
        """Positions that the longest row needs in the next round."""
        active = self.table.positions[self.table.is_active]
        return max(self._prefiller.longest, int(active.max()) + 1 if len(active) else 1)

    def _make_space(self, results: RoundResults) -> None:
        """Provide slots for all running requests. If they do not fit, preempt the youngest."""
        if self._capacity.to_preempt(self._longest()):
            # A preempted request must have all its tokens.
            self._process_launched(results)
        while youngest := self._capacity.to_preempt(self._longest()):
            for request in youngest:
                self._log.flush(request, self._processed_until())
                self._release(request)
                request.is_finished = False
                self.preemptions += 1
            self._preempted.extend(youngest)
        self._capacity.fit(self._longest(), round_number=self._number)


class SlotCapacity:
    """Sets the number and length of the slots: grows them on demand within the budget, and closes gaps between rows."""

    def __init__(self, runner: Runner, table: RowTable, budget: SlotBudget, *, min_rows: int, min_length: int) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._table = table
        self._budget = budget
        self._min_rows, self._min_length = min_rows, min_length

    def to_preempt(self, longest: int) -> list[Request]:
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
        # In large steps: growing copies everything, and captured graphs must be captured again.
        new_length = slots.length if length <= slots.length else max(length, self._min_length, slots.length * 5 // 4)
        new_length = budget.length_for(new_length)
        if budget.rows_for(new_length) < max(rows, min(self._min_rows, budget.rows_for(length))):
            new_length = budget.length_for(length)
        new_rows = max(rows, self._min_rows, slots.rows if rows <= slots.rows else 2 * slots.rows)
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
            request: Request = table.owners[source]
            if request.segments:
                request.segments = [
                    *request.segments[:-1],
                    (*request.segments[-1][:2], round_number),
                    (target, round_number, None),
                ]
            table.move(source, target)
        return table.extent
