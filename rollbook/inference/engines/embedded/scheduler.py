"""Runs the rounds of the embedded engine: decode all running rows, prefill new ones, and process what earlier rounds sampled.

Used by the engine's thread only. Up to `ahead` rounds are launched before the host reads the tokens of the oldest. A row that
reaches its limit is freed at launch. A row that sampled a stop token is noticed later; tokens after the stop token are dropped.
With drafts, a round may give a row several tokens, so no round is launched ahead.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.contracts.policy import FinishReason
from rollbook.inference.engine import GenerationError
from rollbook.inference.engines.drafts import PromptLookup
from rollbook.inference.engines.embedded.row_table import RoundLog, RowTable
from rollbook.inference.engines.embedded.runner import PendingResults
from rollbook.inference.request import GenerationRequest, token_array

LOG_ROUNDS = 4096


@dataclass(slots=True)
class RoundResults:
    """What the processed rounds produced."""

    done: list[tuple[GenerationRequest, FinishReason]] = field(default_factory=list)
    failed: list[tuple[GenerationRequest, Exception]] = field(default_factory=list)
    streamed: list[GenerationRequest] = field(default_factory=list)
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
    ending: list[GenerationRequest]


class RunningBatch(Protocol):
    """The running requests with their memory: `SlotBatch` on a CPU, `PagedBatch` on a GPU. Used by one thread."""

    table: RowTable

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were taken from earlier requests, in all."""

    def num_admissible(self, waiting: Iterable[GenerationRequest]) -> int:
        """How many of the waiting requests, in order, can join now."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Prefill requests in the next rounds. Each owns a row."""

    def launch(self, number: int) -> tuple[NDArray[np.int64], list[int]]:
        """Launch the forwards of round `number`. The rows that decoded, and the rows that sampled their first token."""

    def collect(self) -> PendingResults:
        """The results of the last launch."""

    def retire(self, request: GenerationRequest) -> None:
        """All tokens of the request are launched: its row will be released now, before its tokens are known."""

    def keep(self, request: GenerationRequest) -> None:
        """The request is complete and its tokens are known: keep its keys and values for prompts that continue it."""

    def remove(self, request: GenerationRequest) -> None:
        """Free the memory of a request. Its row is released afterwards, if it still has one."""

    def clean(self, row: int) -> None:
        """A released row may hold NaN: it must not affect the row's next owner."""

    def to_preempt(self) -> list[GenerationRequest]:
        """The youngest requests that must leave before all rows can continue."""

    def make_space(self, number: int) -> None:
        """Provide memory for round `number`. Called when `to_preempt` returns nothing."""

    def shrink(self) -> bool:
        """Give memory back to the device. No request has a row. False: nothing more can be given back."""

    def weights_changed(self) -> None: ...

    def recompute(self, decoding: Sequence[GenerationRequest]) -> None:
        """Compute the keys and values of every row again under the current weights. All tokens are known."""

    def invalidate(self) -> None:
        """A launch failed: forget everything that is shared between requests."""


class Scheduler:
    """Requests enter by `join` and leave by `round` or `drain`."""

    def __init__(
        self,
        batch: RunningBatch,
        *,
        max_length: int,
        ahead: int,
        draft_tokens: int = 0,
        step_tokens: int = 0,
    ) -> None:
        """`ahead`: number of rounds launched before the host waits for the oldest. 0 if there are drafts.

        `draft_tokens`: most drafted tokens of a row in a round. `step_tokens`: of all rows together, with the last token of each.
        """
        self.batch = batch
        self.table = batch.table
        self._ahead = ahead
        self._log = RoundLog(self.table.max_rows, min(LOG_ROUNDS, 2 * max_length + 2 * ahead + 2) + 2 * draft_tokens)
        self._draft_tokens, self._step_tokens = draft_tokens, step_tokens
        self.table.is_drafting = draft_tokens > 0
        self._launched: deque[LaunchedRound] = deque()
        self._streaming: list[GenerationRequest] = []
        self._number = 0
        self._dropped_until = -1
        self.preemptions = 0
        self.drafted = self.accepted = 0
        """Drafted tokens that were computed, and those that were sampled."""
        self._preempted: list[GenerationRequest] = []

    @property
    def num_running(self) -> int:
        return self.table.num_owned

    @property
    def has_launched(self) -> bool:
        """Whether launched rounds are still to be processed."""
        return bool(self._launched)

    def num_admissible(self, waiting: Iterable[GenerationRequest]) -> int:
        """How many of the waiting requests, in order, can join now."""
        return self.batch.num_admissible(waiting)

    def join(self, requests: Sequence[GenerationRequest]) -> None:
        """Give each request a row. Limited by `num_admissible`."""
        rows = self.table.free_rows(len(requests))
        for request, row in zip(requests, rows, strict=True):
            self.table.occupy(row, request)
            if request.on_tokens is not None:
                self._streaming.append(request)
        self.batch.add(requests)

    def cancel(self, requests: Sequence[GenerationRequest]) -> None:
        """Free the rows of cancelled requests and drop their pending tokens."""
        for request in requests:
            if not request.is_finished:
                self._release(request)

    def round(self, publication: int, results: RoundResults) -> None:
        """Launch one round under the weights of `publication`. Adds to `results`, even when it raises."""
        with torch.inference_mode():
            if self._draft_tokens:
                self._draft()
            self._make_space(results)
            if self.table.is_constrained.any():
                self._update_masks(results)
            try:
                self._launch(publication)
            except Exception:
                self.batch.invalidate()
                raise
            while len(self._launched) > self._ahead or (self._launched and not self.num_running):
                self._process_oldest(results)

    def preempt_all(self, results: RoundResults) -> None:
        """Take all requests off their rows, after the rounds that were launched. Adds to `results`, even when it raises."""
        with torch.inference_mode():
            self._process_launched(results)
        self._preempt(self.table.requests())

    def take_preempted(self) -> list[GenerationRequest]:
        """The requests preempted since the last call, in order of arrival. They keep their tokens and must join again."""
        preempted, self._preempted = self._preempted, []
        return sorted(preempted, key=lambda request: request.order)

    def drain(self, results: RoundResults) -> None:
        """Wait for all launched rounds. Adds to `results`, even when it raises."""
        with torch.inference_mode():
            self._process_launched(results)

    def unfinished(self) -> list[GenerationRequest]:
        """All requests. Those that have launched all their tokens have left their rows already."""
        ending = [request for launched in self._launched for request in launched.ending if not request.is_finished]
        return [*ending, *self.table.requests()]

    def clear(self) -> list[GenerationRequest]:
        """Remove all requests. They keep the tokens processed so far; call `drain` first to keep all of them."""
        requests = self.unfinished()
        for request in requests:
            self._log.flush(request, self._processed_until())
            self._release(request)
        self._launched.clear()
        return requests

    def weights_changed(self) -> None:
        self.batch.weights_changed()

    def recompute(self, results: RoundResults) -> None:
        """Recompute the keys and values of every row under the current weights."""
        with torch.inference_mode():
            self._process_launched(results)
            decoding: list[GenerationRequest] = self.table.owners[self.table.is_active].tolist()
            for request in decoding:
                self._log.flush(request, self._processed_until())
            self.batch.recompute(decoding)

    # --- launching a round ---

    def _launch(self, publication: int) -> None:
        table = self.table
        rows, started = self.batch.launch(self._number)
        results = self.batch.collect()
        if started:
            rows = np.concatenate([rows, np.array(started, dtype=np.int64)])
        owners = table.owners[rows]
        stops = table.stops[rows] if table.has_stops else None
        is_constrained = table.is_constrained[rows]
        for row in started:
            table.owners[row].start()
            table.owners[row].segments.append((row, self._number, None))
        ending = self._retire(rows)
        depth = len(results.tokens_DS)
        self._launched.append(
            LaunchedRound(
                number=self._number,
                results=results,
                publication=publication,
                rows=rows,
                owners=owners,
                stops=stops,
                is_constrained=is_constrained,
                ending=ending,
            )
        )
        self._number += depth

    def _draft(self) -> None:
        """Draft tokens for the rows that decode. Not where a mask depends on all tokens before."""
        table = self.table
        rows: list[int] = np.flatnonzero(table.is_active).tolist()
        left = self._step_tokens - len(rows)
        for row in rows:
            request: GenerationRequest = table.owners[row]
            if request.constraint is not None:
                continue
            if request.lookup is None:
                known = np.concatenate([request.prompt, token_array(request.tokens)])
                request.lookup = PromptLookup(known, most=self._draft_tokens)
            # The token after the draft is sampled, too.
            request.draft = request.lookup.draft(min(left, int(table.limits[row] - table.counts[row]) - 1))
            left -= len(request.draft)

    def _update_masks(self, results: RoundResults) -> None:
        """A mask depends on all tokens before it, so rounds are not launched ahead of a constrained row."""
        self._process_launched(results)
        for request in self.table.owners[self.table.is_constrained].tolist():
            try:
                request.update_mask()
            except GenerationError as error:
                results.failed.append((request, error))
                self._release(request)

    def _retire(self, rows: NDArray[np.int64]) -> list[GenerationRequest]:
        """Free the rows that have launched all their tokens."""
        table = self.table
        ended = rows[table.counts[rows] >= table.limits[rows]]
        ending: list[GenerationRequest] = table.owners[ended].tolist()
        for request in ending:
            self.batch.retire(request)
        # Only now: if `retire` raises, `clear` must find all of them in their rows.
        for request in ending:
            request.segments = [*request.segments[:-1], (*request.segments[-1][:2], self._number + 1)]
            table.release(request.row)
        return ending

    # --- processing a launched round ---

    def _process_launched(self, results: RoundResults) -> None:
        while self._launched:
            self._process_oldest(results)

    def _process_oldest(self, results: RoundResults) -> None:
        self._process(self._launched[0], results)
        # Only now: if processing raises, `clear` must find the requests that end with this round.
        self._launched.popleft()

    def _process(self, launched: LaunchedRound, results: RoundResults) -> None:
        tokens_DS, logprobs_DS = launched.results.wait()
        for offset, (tokens_S, logprobs_S) in enumerate(zip(tokens_DS, logprobs_DS, strict=True)):
            tops = launched.results.tops(offset)
            self._log.write(launched.number + offset, tokens_S, logprobs_S, launched.publication, tops)
        until = launched.number + len(tokens_DS)
        results.tokens += len(launched.rows)
        if launched.number <= self._dropped_until:
            results.tokens -= sum(request.is_finished for request in launched.owners)
        is_broken = np.isnan(logprobs_DS[0, launched.rows])
        if is_broken.any():
            self._fail(launched, is_broken, results)
        for request, token in zip(
            launched.owners[launched.is_constrained],
            tokens_DS[0, launched.rows[launched.is_constrained]].tolist(),
            strict=True,
        ):
            request.accept(token)
        if self._draft_tokens:
            self._accept_drafts(launched, tokens_DS, logprobs_DS, results)
        elif launched.stops is not None:
            self._finish_stopped(launched, launched.stops, tokens_DS[0], results)
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

    def _finish_stopped(
        self, launched: LaunchedRound, stops: NDArray[np.int32], tokens_S: NDArray[np.int32], results: RoundResults
    ) -> None:
        """The requests that sampled one of their stop tokens."""
        is_stopped = (tokens_S[launched.rows, None] == stops).any(axis=1)
        for request in launched.owners[is_stopped]:
            if not request.is_finished:
                self._finish(request, launched.number + 1, FinishReason.STOP, results)

    def _accept_drafts(
        self,
        launched: LaunchedRound,
        tokens_DS: NDArray[np.int32],
        logprobs_DS: NDArray[np.float32],
        results: RoundResults,
    ) -> None:
        """Take the tokens of each row up to the first that is not the drafted one, or that ends its request."""
        table, until = self.table, launched.number + len(tokens_DS)
        for row, request in zip(launched.rows.tolist(), launched.owners, strict=True):
            if request.is_finished:
                continue
            draft, request.draft = request.draft, []
            tokens: list[int] = tokens_DS[: len(draft) + 1, row].tolist()
            accepted = next((at for at, token in enumerate(draft) if tokens[at] != token), len(draft))
            is_number = ~np.isnan(logprobs_DS[: accepted + 1, row])
            # The next round fails the request.
            accepted = accepted if is_number.all() else int(is_number.argmin()) - 1
            stops = request.sampling.stop_token_ids
            is_stopped = False
            if stops:
                stopped_at = next((at for at, token in enumerate(tokens[: accepted + 1]) if token in stops), None)
                is_stopped = stopped_at is not None
                accepted = accepted if stopped_at is None else stopped_at
            self.drafted += len(draft)
            self.accepted += accepted
            results.tokens += accepted
            request.segments = [(row, launched.number, launched.number + accepted + 1)]
            self._log.flush(request, until)
            if request.lookup is not None:
                request.lookup.sampled(drafted=len(draft), accepted=accepted)
                request.lookup.extend(np.array(tokens[: accepted + 1], dtype=np.int32))
            has_row = table.owners[row] is request
            if has_row:
                table.positions[row] += accepted
                table.counts[row] += accepted
                request.segments = [(row, until, None)]
            if is_stopped:
                self._finish(request, until, FinishReason.STOP, results)
            elif has_row and table.counts[row] >= table.limits[row]:
                self._finish(request, until, FinishReason.LENGTH, results)

    def _finish(self, request: GenerationRequest, until: int, reason: FinishReason, results: RoundResults) -> None:
        self._log.flush(request, until)
        self.batch.keep(request)
        self._release(request)
        if request.on_tokens is not None:
            results.streamed.append(request)
        results.done.append((request, reason))

    def _fail(self, launched: LaunchedRound, is_broken: NDArray[np.bool_], results: RoundResults) -> None:
        broken = [request for request in launched.owners[is_broken] if not request.is_finished]
        results.tokens -= len(broken)
        for request in broken:
            self._log.flush(request, launched.number)
            row = request.row
            position = len(request.prompt) + len(request.tokens)
            error = GenerationError(
                f"publication {launched.publication} has logits that are not numbers at position {position}; this request failed, "
                "others continue. The weights have probably diverged"
            )
            results.failed.append((request, error))
            self._release(request)
            if self.table.owners[row] is None:
                self.batch.clean(row)

    def _release(self, request: GenerationRequest) -> None:
        """Remove a request. Frees its row, unless it has left it already."""
        request.is_finished = True
        if request.segments:
            # Tokens that are already launched for it are not counted.
            self._dropped_until = self._number
            request.segments = []
        self.batch.remove(request)
        if request.row >= 0 and self.table.owners[request.row] is request:
            self.table.release(request.row)

    def _processed_until(self) -> int:
        return self._launched[0].number if self._launched else self._number

    # --- memory ---

    def _make_space(self, results: RoundResults) -> None:
        """Provide memory for the next token of all running requests. If they do not fit, preempt the youngest."""
        if self.batch.to_preempt():
            # A preempted request must have all its tokens.
            self._process_launched(results)
        while youngest := self.batch.to_preempt():
            self._preempt(youngest)
        self.batch.make_space(self._number)

    def _preempt(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._log.flush(request, self._processed_until())
            self._release(request)
            request.is_finished = False
            # It was made for a round that does not run. The first round after the next prefill computes no draft.
            request.draft = []
            self.preemptions += 1
        # `join` adds them again.
        self._streaming = [request for request in self._streaming if request not in requests]
        self._preempted.extend(requests)
