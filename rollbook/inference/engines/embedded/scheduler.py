"""One round of the embedded engine: decode those who run, prefill those who join, and hear what earlier rounds sampled.

Owned by the engine's thread. It knows requests, rows and the runner; it knows nothing of threads and queues. Rounds are
launched up to `ahead` before the host reads what they sampled: rows that reach their limit leave at launch, rows that sampled a
stop token are noticed later, and what they sampled beyond it is dropped.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.contracts.policy import FinishReason
from rollbook.inference.engine import GenerationError
from rollbook.inference.engines.batching import LENGTH_STEP, SlotBudget, joinable
from rollbook.inference.engines.embedded.cache.prefix_cache import PrefixStore
from rollbook.inference.engines.embedded.cache.slot_capacity import Room
from rollbook.inference.engines.embedded.prefill import Prefiller
from rollbook.inference.engines.embedded.rounds import Finished, LaunchedRound, StepLimits
from rollbook.inference.engines.embedded.row_table import RoundLog, RowTable
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.request import Request

LOG_ROUNDS = 4096


class Stepper:
    """Requests go in by `join`, and come out of `round` or `drain`."""

    def __init__(
        self,
        runner: Runner,
        *,
        budget: SlotBudget,
        limits: StepLimits,
        memo_rows: int = 0,
        prefix_tokens: int = 0,
        least_prefix: int = 1,
        min_rows: int = 1,
        min_length: int = LENGTH_STEP,
    ) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._budget = budget
        self._limits = limits
        self.table = RowTable(budget.max_rows)
        self._room = Room(runner, self.table, budget, min_rows=min_rows, min_length=min_length)
        self.prefixes = PrefixStore(runner.slots, max_tokens=prefix_tokens, least=least_prefix)
        self._prefiller = Prefiller(
            runner,
            self.table,
            round_tokens=limits.round_tokens,
            forward_tokens=limits.forward_tokens,
            memo_rows=memo_rows,
            prefixes=self.prefixes,
        )
        self._log = RoundLog(budget.max_rows, min(LOG_ROUNDS, 2 * budget.max_length + 2 * limits.ahead + 2))
        self._flying: deque[LaunchedRound] = deque()
        self._streaming: list[Request] = []
        self._number = 0
        self._dropped_until = -1
        self.preemptions = 0
        self._preempted: list[Request] = []
        with torch.inference_mode():
            self._room.fit(1, round_number=0)

    @property
    def num_running(self) -> int:
        return self.table.num_owned

    @property
    def is_flying(self) -> bool:
        return bool(self._flying)

    def room_for(self, lengths: Iterable[int]) -> int:
        """How many of those who wait, in order, may join now."""
        return joinable(
            lengths,
            running=self.num_running,
            longest=self._longest(),
            budget=self._budget,
            max_tokens=self._limits.round_tokens,
            free_slots=self._budget.max_rows - self.num_running,
        )

    def join(self, requests: Sequence[Request]) -> None:
        """Give each a row. `room_for` has said that they fit."""
        rows = self.table.free_rows(len(requests))
        for request, row in zip(requests, rows, strict=True):
            self.table.occupy(row, request)
            request.mark = self.prefixes.mark
            if request.on_tokens is not None:
                self._streaming.append(request)
        self._prefiller.add(requests)

    def leave(self, requests: Sequence[Request]) -> None:
        """Requests nobody waits for any more: their rows are free, what is still to come of them is dropped."""
        for request in requests:
            if not request.is_finished:
                self._let_go(request)

    def round(self, publication: int, finished: Finished) -> None:
        """Launch one round under the weights of `publication`. What became known is added to `finished`, also if it raises."""
        with torch.inference_mode():
            self._make_room(finished)
            self._launch(publication)
            while len(self._flying) > self._limits.ahead or (self._flying and not self.num_running):
                self._hear(self._flying.popleft(), finished)

    def take_preempted(self) -> list[Request]:
        """Who had to make room, in order of arrival. They keep their tokens and join again."""
        preempted, self._preempted = self._preempted, []
        return sorted(preempted, key=lambda request: request.order)

    def drain(self) -> Finished:
        """Wait for everything that was launched."""
        finished = Finished()
        with torch.inference_mode():
            while self._flying:
                self._hear(self._flying.popleft(), finished)
        return finished

    def clear(self) -> list[Request]:
        """Give up everybody. They keep the tokens that are known: drain first to have them all."""
        # Who has launched all its tokens has left its row, and is still to be heard of.
        ending = [request for launched in self._flying for request in launched.ending if not request.is_finished]
        requests = [*ending, *self.table.requests()]
        for request in requests:
            self._log.hand_over(request, self._heard_until())
            self._let_go(request)
        self._flying.clear()
        return requests

    def weights_changed(self) -> None:
        self._prefiller.weights_changed()
        self.prefixes.weights_changed()

    def recompute(self, finished: Finished) -> None:
        """Fill the cache of every decoding row again, under the current weights."""
        with torch.inference_mode():
            while self._flying:
                self._hear(self._flying.popleft(), finished)
            decoding: list[Request] = self.table.owners[self.table.is_active].tolist()
            for request in decoding:
                self._log.hand_over(request, self._heard_until())
            # All tokens but the last: its keys are written by the decode that consumes it.
            self._prefiller.fill_now([(r, [*r.prompt, *r.tokens[:-1]]) for r in decoding])
            self._prefiller.begin_again()
            for request in self.table.requests():
                request.mark = self.prefixes.mark

    # --- one round ---

    def _launch(self, publication: int) -> None:
        table = self.table
        rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        if table.is_active.any():
            extent = self._room.compact(self._number)
            table.prepare()
            rows = np.flatnonzero(table.is_active)
            self._runner.decode(table, extent, length=int(table.positions[:extent].max()) + 1)
            table.positions[rows] += 1
            table.counts[rows] += 1
        begun = self._prefiller.round() if self._prefiller.has_work else []
        if begun:
            rows = np.concatenate([rows, np.array(begun, dtype=np.int64)])
        owners = table.owners[rows]
        stops = table.stops[rows] if table.has_stops else None
        for row in begun:
            table.owners[row].begins()
            table.owners[row].segments.append((row, self._number, None))
        ending = self._retire(rows)
        self._flying.append(
            LaunchedRound(
                number=self._number,
                flight=self._runner.collect(has_tops=table.has_tops),
                publication=publication,
                rows=rows,
                owners=owners,
                stops=stops,
                ending=ending,
            )
        )
        self._number += 1

    def _retire(self, rows: NDArray[np.int64]) -> list[Request]:
        """Rows that have launched all they may: free for others from the next launch on."""
        table = self.table
        ended: list[int] = rows[table.counts[rows] >= table.limits[rows]].tolist()
        ending: list[Request] = []
        for row in ended:
            request: Request = table.owners[row]
            request.segments = [*request.segments[:-1], (*request.segments[-1][:2], self._number + 1)]
            ending.append(request)
            # Now: the row's next tenant may be launched before we hear what the last token is.
            request.kept = self.prefixes.take_out(row, int(table.positions[row]), mark=request.mark)
            table.release(row)
        return ending

    # --- hearing of a round ---

    def _hear(self, heard: LaunchedRound, finished: Finished) -> None:
        tokens_S, logprobs_S = heard.flight.wait()
        self._log.write(heard.number, tokens_S, logprobs_S, heard.publication, heard.flight.tops())
        until = heard.number + 1
        finished.tokens += len(heard.rows)
        if heard.number <= self._dropped_until:
            finished.tokens -= sum(request.is_finished for request in heard.owners)
        logprobs = logprobs_S[heard.rows]
        is_broken = np.isnan(logprobs)
        if is_broken.any():
            self._fail(heard, is_broken, finished)
        if heard.stops is not None:
            hits = (tokens_S[heard.rows, None] == heard.stops).any(axis=1)
            for request in heard.owners[hits]:
                if not request.is_finished:
                    self._end(request, until, FinishReason.STOP, finished)
        for request in heard.ending:
            if not request.is_finished:
                self._end(request, until, FinishReason.LENGTH, finished)
        if self._streaming:
            self._streaming = [request for request in self._streaming if not request.is_finished]
            for request in self._streaming:
                self._log.hand_over(request, until)
            finished.told.extend(self._streaming)
        if until % max(1, self._log.capacity // 2) == 0:
            for request in self.table.requests():
                self._log.hand_over(request, until)

    def _end(self, request: Request, until: int, reason: FinishReason, finished: Finished) -> None:
        self._log.hand_over(request, until)
        self._keep(request)
        self._let_go(request)
        if request.on_tokens is not None:
            finished.told.append(request)
        finished.done.append((request, reason))

    def _keep(self, request: Request) -> None:
        """What it computed may be of use to the prompt that goes on from here. The last token's keys were never written."""
        if request.kept is None and self.table.owners[request.row] is request:
            length = len(request.prompt) + len(request.tokens) - 1
            request.kept = self.prefixes.take_out(request.row, length, mark=request.mark)
        if request.kept is not None:
            self.prefixes.keep([*request.prompt, *request.tokens[:-1]], request.kept, mark=request.mark)
            request.kept = None

    def _fail(self, heard: LaunchedRound, is_broken: NDArray[np.bool_], finished: Finished) -> None:
        broken = [request for request in heard.owners[is_broken] if not request.is_finished]
        finished.tokens -= int(is_broken.sum())
        for request in broken:
            self._log.hand_over(request, heard.number)
            row = request.row
            finished.failed.append((request, _not_a_number(request, heard.publication)))
            self._let_go(request)
            if self.table.owners[row] is None:
                # What is not a number must not linger in a slot: even a masked position would spoil the next tenant.
                self._slots.wipe([row])

    def _let_go(self, request: Request) -> None:
        """The request is over, or over here. Its row is free unless it has left it already."""
        request.is_finished = True
        request.segments = []
        if request.row >= 0 and self.table.owners[request.row] is request:
            # Before its time: what was launched for it beyond this does not count.
            self._dropped_until = self._number
            self.table.release(request.row)
        self._prefiller.forget(request)

    def _heard_until(self) -> int:
        return self._flying[0].number if self._flying else self._number

    # --- memory ---

    def _longest(self) -> int:
        """Positions the longest row will need in the next round."""
        active = self.table.positions[self.table.is_active]
        return max(self._prefiller.longest, int(active.max()) + 1 if len(active) else 1)

    def _make_room(self, finished: Finished) -> None:
        """Slots for everybody who runs. Who must leave for that, the youngest first, keeps its tokens and joins again later."""
        if self._room.youngest_beyond(self._longest()):
            # Everything must be known of those who leave.
            while self._flying:
                self._hear(self._flying.popleft(), finished)
        while youngest := self._room.youngest_beyond(self._longest()):
            for request in youngest:
                self._log.hand_over(request, self._heard_until())
                self._let_go(request)
                request.is_finished = False
                self.preemptions += 1
            self._preempted.extend(youngest)
        self._room.fit(self._longest(), round_number=self._number)


def _not_a_number(request: Request, publication: int) -> GenerationError:
    position = len(request.prompt) + len(request.tokens)
    return GenerationError(
        f"publication {publication} gave logits that are not numbers at position {position}; this request was given up, "
        "others go on. The weights have probably diverged"
    )
