"""One round of the embedded engine: decode those who run, prefill those who join, and hear what earlier rounds sampled.

Owned by the engine's thread. It knows requests, rows and the runner; it knows nothing of threads and queues. Rounds are
launched up to `ahead` before the host reads what they sampled: rows that reach their limit leave at launch, rows that sampled a
stop token are noticed later, and what they sampled beyond it is dropped.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.contracts.policy import FinishReason
from rollbook.inference.batching import (
    LENGTH_STEP,
    Piece,
    SlotBudget,
    compaction,
    excess,
    joinable,
    pieces_of_round,
    prefill_forwards,
)
from rollbook.inference.engine import GenerationError
from rollbook.inference.engines.prompt_memo import PromptMemo
from rollbook.inference.engines.rows import RoundLog, RowTable
from rollbook.inference.engines.runner import Flight, Runner
from rollbook.inference.request import Request

LOG_ROUNDS = 4096


@dataclass(slots=True)
class Finished:
    """What became known."""

    done: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    told: list[Request] = field(default_factory=list)
    """Who streams and has new tokens."""
    tokens: int = 0

    def add(self, more: "Finished") -> None:
        self.done += more.done
        self.failed += more.failed
        self.told += more.told
        self.tokens += more.tokens


@dataclass(slots=True, eq=False)
class _Filling:
    """A request whose row is being prefilled. Siblings bring the same tokens: they get a copy."""

    request: Request
    tokens: list[int]
    done: int = 0
    siblings: list[Request] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.done >= len(self.tokens)

    @property
    def wants_one_token(self) -> bool:
        return any(r.limit - len(r.tokens) == 1 for r in (self.request, *self.siblings))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Logits of a forward, and who is ready to sample from which line of it."""

    logits_NV: Tensor
    ready: list[tuple[int, _Filling]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Launched, not yet heard of."""

    number: int
    flight: Flight
    publication: int
    rows: NDArray[np.int64]
    owners: NDArray[np.object_]
    stops: NDArray[np.int32] | None
    ending: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    round_tokens: int
    """Prompt tokens prefilled in a round at most."""
    forward_tokens: int
    """Of one forward, padding included."""
    ahead: int
    """Rounds launched before the host waits for the oldest."""


class Stepper:
    """Requests go in by `join`, and come out of `round` or `drain`."""

    def __init__(
        self,
        runner: Runner,
        *,
        budget: SlotBudget,
        limits: StepLimits,
        memo_rows: int = 0,
        min_rows: int = 1,
        min_length: int = LENGTH_STEP,
    ) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._budget = budget
        self._limits = limits
        self._min_rows, self._min_length = min_rows, min_length
        self.table = RowTable(budget.max_rows)
        self._log = RoundLog(budget.max_rows, min(LOG_ROUNDS, 2 * budget.max_length + 2 * limits.ahead + 2))
        self._memo = PromptMemo(memo_rows)
        self._known: list[tuple[Request, Tensor]] = []
        self._filling: list[_Filling] = []
        self._flying: deque[_Round] = deque()
        self._streaming: list[Request] = []
        self._number = 0
        self._dropped_until = -1
        self.preemptions = 0
        with torch.inference_mode():
            self._fit(1, 1)

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
        leaders: dict[tuple[int, ...], _Filling] = {}
        for request, row in zip(requests, rows, strict=True):
            self.table.occupy(row, request)
            if request.on_tokens is not None:
                self._streaming.append(request)
            tokens = (*request.prompt, *request.tokens)
            leader = leaders.get(tokens)
            if leader is not None:
                leader.siblings.append(request)
            elif request.limit - len(request.tokens) == 1 and (logits_V := self._memo.get(tokens)) is not None:
                self._known.append((request, logits_V))
            else:
                leaders[tokens] = _Filling(request, list(tokens))
        self._filling.extend(leaders.values())

    def leave(self, requests: Sequence[Request]) -> None:
        """Requests nobody waits for any more: their rows are free, what is still to come of them is dropped."""
        for request in requests:
            if not request.is_finished:
                self._let_go(request)

    def round(self, publication: int) -> tuple[Finished, list[Request]]:
        """Launch one round under the weights of `publication`. Gives what became known, and who had to make room."""
        finished = Finished()
        with torch.inference_mode():
            preempted = self._make_room(finished)
            self._launch(publication)
            while len(self._flying) > self._limits.ahead or (self._flying and not self.num_running):
                self._hear(self._flying.popleft(), finished)
        return finished, preempted

    def drain(self) -> Finished:
        """Wait for everything that was launched."""
        finished = Finished()
        with torch.inference_mode():
            while self._flying:
                self._hear(self._flying.popleft(), finished)
        return finished

    def clear(self) -> list[Request]:
        """Give up all running requests. They keep the tokens that are known: drain first to have them all."""
        requests = self.table.requests()
        for request in requests:
            self._log.hand_over(request, self._heard_until())
            self._let_go(request)
        self._flying.clear()
        return requests

    def weights_changed(self) -> None:
        self._memo.clear()

    def recompute(self, finished: Finished) -> None:
        """Fill the cache of every decoding row again, under the current weights."""
        with torch.inference_mode():
            while self._flying:
                self._hear(self._flying.popleft(), finished)
            rows = np.flatnonzero(self.table.is_active).tolist()
            fillings = []
            for row in rows:
                request: Request = self.table.owners[row]
                self._log.hand_over(request, self._heard_until())
                # All tokens but the last: its keys are written by the decode that consumes it.
                fillings.append(_Filling(request, [*request.prompt, *request.tokens[:-1]]))
            # What was begun under the older weights begins again.
            for filling in self._filling:
                filling.done = 0
                self.table.positions[filling.request.row] = 0
            while not all(filling.is_ready for filling in fillings):
                deque(self._fill(fillings), maxlen=0)

    # --- one round ---

    def _launch(self, publication: int) -> None:
        table = self.table
        rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        if table.is_active.any():
            extent = self._compact()
            table.prepare()
            rows = np.flatnonzero(table.is_active)
            self._runner.decode(table, extent, length=int(table.positions[:extent].max()) + 1)
            table.positions[rows] += 1
            table.counts[rows] += 1
        begun = self._prefill() if self._filling or self._known else []
        if begun:
            rows = np.concatenate([rows, np.array(begun, dtype=np.int64)])
        owners = table.owners[rows]
        stops = table.stops[rows] if table.has_stops else None
        for row in begun:
            table.owners[row].begins()
            table.owners[row].segments.append((row, self._number, None))
        ending = self._retire(rows)
        self._flying.append(
            _Round(
                number=self._number,
                flight=self._runner.collect(),
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
            table.release(row)
        return ending

    def _prefill(self) -> list[int]:
        """Fill what this round may fill. Gives the rows that sampled their first token."""
        begun: list[int] = []
        self.table.prepare()
        if self._known:
            begun += [request.row for request, _ in self._known]
            logits_NV = torch.stack([logits_V for _, logits_V in self._known])
            self._runner.begin_rows(self.table, begun, logits_NV, range(len(begun)))
            self._known = []
        for heads in self._fill(self._filling):
            rows: list[int] = []
            sources: list[int] = []
            for line, filling in heads.ready:
                self._copy_to_siblings(filling)
                if filling.wants_one_token:
                    self._memo.put(tuple(filling.tokens), heads.logits_NV[line])
                for request in (filling.request, *filling.siblings):
                    rows.append(request.row)
                    sources.append(line)
                    self.table.positions[request.row] = len(filling.tokens)
            if rows:
                self._runner.begin_rows(self.table, rows, heads.logits_NV, sources)
                begun += rows
        self._filling = [filling for filling in self._filling if not filling.is_ready]
        self.table.counts[begun] += 1
        self.table.is_active[begun] = True
        return begun

    def _fill(self, fillings: Sequence[_Filling]) -> Iterator[_Heads]:
        """One round's share of prefilling, forward by forward."""
        limits = self._limits
        waves = pieces_of_round(
            [(filling.done, len(filling.tokens)) for filling in fillings],
            max_tokens=limits.round_tokens,
            piece_tokens=limits.forward_tokens,
        )
        for wave in waves:
            for is_fresh in (True, False):
                pieces = [piece for piece in wave if (piece.start == 0) is is_fresh]
                for forward in prefill_forwards(
                    [piece.length for piece in pieces],
                    max_tokens=limits.forward_tokens,
                    forward_cost=self._runner.forward_cost_tokens,
                ):
                    yield self._forward(fillings, [pieces[index] for index in forward], is_fresh=is_fresh)

    def _forward(self, fillings: Sequence[_Filling], pieces: Sequence[Piece], *, is_fresh: bool) -> _Heads:
        logits_NV = self._runner.prefill(
            [fillings[piece.index].request.row for piece in pieces],
            [fillings[piece.index].tokens[piece.start : piece.end] for piece in pieces],
            [piece.start for piece in pieces],
            is_fresh=is_fresh,
        )
        ready: list[tuple[int, _Filling]] = []
        for line, piece in enumerate(pieces):
            filling = fillings[piece.index]
            filling.done = piece.end
            if not self.table.is_active[filling.request.row]:
                self.table.positions[filling.request.row] = piece.end
            if filling.is_ready:
                ready.append((line, filling))
        return _Heads(logits_NV, ready)

    def _copy_to_siblings(self, filling: _Filling) -> None:
        targets = [sibling.row for sibling in filling.siblings if sibling.limit - len(sibling.tokens) > 1]
        if targets:
            sources = [filling.request.row] * len(targets)
            self._slots.copy_rows(sources, targets, length=len(filling.tokens))

    # --- hearing of a round ---

    def _hear(self, heard: _Round, finished: Finished) -> None:
        tokens_S, logprobs_S = heard.flight.wait()
        self._log.write(heard.number, tokens_S, logprobs_S, heard.publication)
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
        self._let_go(request)
        if request.on_tokens is not None:
            finished.told.append(request)
        finished.done.append((request, reason))

    def _fail(self, heard: _Round, is_broken: NDArray[np.bool_], finished: Finished) -> None:
        broken = [request for request in heard.owners[is_broken] if not request.is_finished]
        finished.tokens -= int(is_broken.sum())
        for request in broken:
            self._log.hand_over(request, heard.number)
            row = request.row
            is_here = self.table.owners[row] is request
            finished.failed.append((request, _not_a_number(request, heard.publication)))
            self._let_go(request)
            if is_here:
                # What is not a number must not linger in a slot: even a masked position would spoil the next tenant.
                self._slots.wipe([row])

    def _let_go(self, request: Request) -> None:
        """The request is over, or over here. Its row is free unless it has left it already."""
        request.is_finished = True
        request.segments = []
        self._dropped_until = self._number
        if request.row >= 0 and self.table.owners[request.row] is request:
            self.table.release(request.row)
        self._known = [(known, logits_V) for known, logits_V in self._known if known is not request]
        for filling in self._filling:
            if request is filling.request and filling.siblings:
                # The next sibling is filled from the beginning, in its own row.
                filling.request, filling.done = filling.siblings.pop(0), 0
            elif request in filling.siblings:
                filling.siblings.remove(request)
        self._filling = [filling for filling in self._filling if filling.request is not request]

    def _heard_until(self) -> int:
        return self._flying[0].number if self._flying else self._number

    # --- memory ---

    def _longest(self) -> int:
        """Positions the longest row will need in the next round."""
        needed = [len(filling.tokens) + 1 for filling in self._filling]
        active = self.table.positions[self.table.is_active]
        return max([*needed, int(active.max()) + 1 if len(active) else 1])

    def _make_room(self, finished: Finished) -> list[Request]:
        """Slots for everybody who runs. Who must leave for that, the youngest first, keeps its tokens and joins again later."""
        if excess(running=self.num_running, longest=self._longest(), budget=self._budget):
            # Everything must be known of those who leave.
            while self._flying:
                self._hear(self._flying.popleft(), finished)
        preempted: list[Request] = []
        while over := excess(running=self.num_running, longest=self._longest(), budget=self._budget):
            youngest = sorted(self.table.requests(), key=lambda request: request.order)[-over:]
            for request in youngest:
                self._log.hand_over(request, self._heard_until())
                self._let_go(request)
                request.is_finished = False
                self.preemptions += 1
            preempted.extend(youngest)
        self._fit(self.table.extent, self._longest())
        return sorted(preempted, key=lambda request: request.order)

    def _fit(self, rows: int, length: int) -> None:
        """Grow the slots when they are too few or too short. Where both do not fit, they get no longer than they must be."""
        budget, slots = self._budget, self._slots
        if rows <= slots.rows and length <= slots.length:
            return
        if rows > budget.rows_for(length):
            self._compact(force=True)
            rows = self.num_running
        # In big steps: growing copies everything, and whatever was captured is captured again.
        new_length = slots.length if length <= slots.length else max(length, self._min_length, slots.length * 5 // 4)
        new_length = budget.length_for(new_length)
        if budget.rows_for(new_length) < max(rows, min(self._min_rows, budget.rows_for(length))):
            new_length = budget.length_for(length)
        new_rows = max(rows, self._min_rows, slots.rows if rows <= slots.rows else 2 * slots.rows)
        slots.resize(min(new_rows, budget.rows_for(new_length)), new_length)

    def _compact(self, *, force: bool = False) -> int:
        """Close gaps between rows where that makes the step smaller. Gives the rows a decode must cover."""
        table = self.table
        extent = table.extent
        if extent == table.num_owned or not (force or self._runner.is_smaller(table.num_owned, extent)):
            return extent
        moves = compaction(table.holes(extent))
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        length = min(self._slots.length, int(table.positions[sources].max()) + 1)
        self._slots.copy_rows(sources, targets, length=length)
        self._runner.move_tokens(sources, targets)
        for source, target in moves:
            request: Request = table.owners[source]
            if request.segments:
                request.segments = [
                    *request.segments[:-1],
                    (*request.segments[-1][:2], self._number),
                    (target, self._number, None),
                ]
            table.move(source, target)
        return table.extent


def _not_a_number(request: Request, publication: int) -> GenerationError:
    position = len(request.prompt) + len(request.tokens)
    return GenerationError(
        f"publication {publication} gave logits that are not numbers at position {position}; this request was given up, "
        "others go on. The weights have probably diverged"
    )
