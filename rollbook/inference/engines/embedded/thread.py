"""The thread that owns model and cache: receives requests and commands, runs rounds, and returns completions.

All requests of one event loop iteration reach the thread in one batch, and all completions of one round are returned in one call.
Commands (pause, new weights, a copy of the weights) run between two rounds.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, takewhile
from queue import Empty, SimpleQueue

import torch

from rollbook.contracts.errors import is_out_of_memory
from rollbook.contracts.policy import Completion, FinishReason, OnTokens, Publication, TokenChunk
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import EngineClosedError, GenerationError, UnpublishedError
from rollbook.inference.engines.busy import IDLE_GAP_S, BusyPeriods
from rollbook.inference.engines.embedded.build import EngineParts
from rollbook.inference.engines.embedded.scheduler import RoundResults
from rollbook.inference.pause import Gate, PauseMode
from rollbook.inference.request import GenerationRequest

Command = Callable[[], None]

MEMORY_ADVICE = "Lower inference.kv_memory_mb, inference.max_running or inference.forward_tokens, or use another device"
HALF_LOADED = "the weights were replaced in part by an update that failed: nothing is sampled until an update succeeds"

log = logging.getLogger(__name__)


class EngineThread:
    """The first group of methods and the counters are for the event loop; the others run in the thread."""

    def __init__(
        self, parts: EngineParts, config: InferenceConfig, *, loop: asyncio.AbstractEventLoop, busy: BusyPeriods
    ) -> None:
        self.gate = Gate()
        self.publication: Publication | None = None
        self.is_cache_outdated = False
        self.is_half_loaded = False
        """An update replaced some of the weights and failed: nothing is sampled until an update succeeds."""
        self.is_closed = False
        self.failure: BaseException | None = None
        """What ended the thread, if it was not `close`. A forward that fails does not."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called on the event loop after such an end."""
        # Written by the thread only, read by the event loop.
        self.admitted = self.completed = self.tokens = self.steps = 0
        self.shrinks = 0
        """How often the cache became smaller because the device had no memory left."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._config = config
        self._loop = loop
        self._busy = busy
        # Bounded by max_queued: the engine limits the requests that are submitted and not yet admitted.
        self._inbox: SimpleQueue[Command | list[GenerationRequest]] = SimpleQueue()
        self._waiting: deque[GenerationRequest] = deque()
        self._drain_waiters: list[asyncio.Future[None]] = []

    # --- for the event loop ---

    def enqueue(self, requests: list[GenerationRequest], cancelled: list[GenerationRequest]) -> None:
        if requests:
            self._inbox.put(requests)
        if cancelled:
            self._inbox.put(lambda: self._cancel(cancelled))

    async def between_rounds(self, command: Command) -> None:
        """Run a command in the thread, between two rounds. Raises what it raises, and `EngineClosedError` after `close`."""
        self._require_open()
        done: asyncio.Future[None] = self._loop.create_future()

        def execute() -> None:
            error: Exception | None = None
            try:
                self._require_open()
                command()
            except Exception as raised:
                error = raised
            self._loop.call_soon_threadsafe(_settle, done, error)

        self._inbox.put(execute)
        await done

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no tokens are being sampled."""
        drained: asyncio.Future[None] = self._loop.create_future()

        def pause() -> None:
            self.gate.pause(mode)
            if mode is PauseMode.ABORT:
                self._abort(with_waiting=False)
            self._drain_waiters.append(drained)

        await self.between_rounds(pause)
        await drained

    async def abort_all(self) -> int:
        counts: list[int] = []
        await self.between_rounds(lambda: counts.append(self._abort(with_waiting=True)))
        return counts[0]

    def end_if_half_loaded(self) -> None:
        """End all requests with an error if the weights were replaced in part. Does not wait."""
        self._inbox.put(self._end_if_half_loaded)

    def close(self) -> None:
        self.is_closed = True
        # An empty command wakes the thread.
        self._inbox.put(lambda: None)

    # --- in the thread ---

    def run(self) -> None:
        """Run rounds while there is work, until closed.

        Takes:  requests and commands, from the inbox.
        Gives:  completions, through the event loop.
        Waits:  for the inbox, when no request runs or may run.
        Ends:   after `close`, or if what surrounds the forwards fails; the remaining requests fail.
        """
        try:
            with self._device_stream():
                while self._read_inbox():
                    if self._has_work():
                        self._round()
                    elif self._scheduler.has_launched:
                        self._drain()
                    self._notify_drained()
                self._busy.end_period()
        except BaseException as error:
            log.exception("the thread of the engine failed")
            self.failure = error
        # On the event loop, so that nothing is added to the inbox meanwhile.
        self._loop.call_soon_threadsafe(self._fail_all)

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineClosedError("the engine is closed")

    def _cancel(self, cancelled: Sequence[GenerationRequest]) -> None:
        """Free the slots of cancelled requests, and remove them from the queue."""
        if self.is_closed:
            return
        self._scheduler.cancel(cancelled)
        waiting = deque(request for request in self._waiting if not request.future.done())
        self.admitted += len(self._waiting) - len(waiting)
        self._waiting = waiting

    def fail_adapters(self, slots: Collection[int], error: Exception) -> None:
        """End the requests that use these adapters with an error. Only in the thread."""
        if not slots:
            return
        self._drain()
        users = [r for r in [*self._scheduler.table.requests(), *self._waiting] if r.adapter in slots]
        self._return([(request.future, error) for request in users])
        self._scheduler.cancel([request for request in users if request not in self._waiting])
        self.admitted += sum(request in users for request in self._waiting)
        self._waiting = deque(request for request in self._waiting if request not in users)

    def _end_if_half_loaded(self) -> None:
        if not self.is_half_loaded or self.is_closed:
            return
        self._drain()
        ended = [*self._scheduler.clear(), *self._waiting]
        self.admitted += len(self._waiting)
        self._waiting.clear()
        self._return([(request.future, UnpublishedError(HALF_LOADED)) for request in ended])

    def _abort(self, *, with_waiting: bool) -> int:
        self._drain()
        ended = self._scheduler.clear()
        removed = [request for request in self._waiting if with_waiting or _is_preempted(request)]
        ended += removed
        self.admitted += len(removed)
        # Preempted requests are the first in the queue.
        self._waiting = deque(islice(self._waiting, len(removed), None))
        ended = [request for request in ended if not request.future.done()]
        self._return([(request.future, request.completion(FinishReason.ABORT)) for request in ended])
        return len(ended)

    def _drain(self) -> None:
        """Wait for all launched rounds. If the device fails, all running requests fail."""
        results = RoundResults()
        try:
            self._scheduler.drain(results)
        except Exception as error:
            results.failed += self._all_failed(error).failed
        self._report(results)

    def _all_failed(self, error: Exception) -> RoundResults:
        message = f"a forward of {self._scheduler.num_running} running requests failed: {type(error).__name__}: {error}"
        return RoundResults(failed=[(request, GenerationError(message)) for request in self._scheduler.clear()])

    def _device_stream(self) -> AbstractContextManager[object]:
        """On a GPU, this thread uses a separate stream: graph capture needs one."""
        device = self._parts.model.device
        if device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.default_stream(device))
        return torch.cuda.stream(stream)

    def _round(self) -> None:
        """One step, its completions and its metrics."""
        started = time.time()
        results = self._step()
        self.steps += 1
        self._report(results)
        self._busy.step(
            started,
            time.time(),
            requests=len(results.done),
            tokens=results.tokens,
            publication=self.publication.id if self.publication else -1,
        )

    def _report(self, results: RoundResults) -> None:
        """Send new tokens, completions and errors to the callers."""
        self.tokens += results.tokens
        chunks = [
            (r.on_tokens, chunk) for r in results.streamed if r.on_tokens and (chunk := r.take_chunk()) is not None
        ]
        if chunks:
            self._loop.call_soon_threadsafe(_stream, chunks)
        self._return([(r.future, r.completion(reason)) for r, reason in results.done])
        self._return([(r.future, error) for r, error in results.failed])

    def _has_work(self) -> bool:
        return not self.is_half_loaded and (
            self._may_admit() or (self._scheduler.num_running > 0 and self.gate.may_step)
        )

    def _may_admit(self) -> bool:
        """Whether the first waiting request may join. While running requests finish, preempted ones join again."""
        if not self._waiting:
            return False
        return self.gate.may_admit or (self.gate.may_step and _is_preempted(self._waiting[0]))

    def _read_inbox(self) -> bool:
        """Process all arrivals; waits for one only if there is no work. False once the engine is closed."""
        try:
            if not self._has_work() and not self._scheduler.has_launched:
                self._accept(self._wait_for_arrival())
            while True:
                self._accept(self._inbox.get_nowait())
        except Empty:
            return not self.is_closed

    def _wait_for_arrival(self) -> Command | list[GenerationRequest]:
        if self._busy.is_open:
            try:
                return self._inbox.get(timeout=IDLE_GAP_S)
            except Empty:
                self._busy.end_period()
        return self._inbox.get()

    def _accept(self, arrival: Command | list[GenerationRequest]) -> None:
        if isinstance(arrival, list):
            self._waiting.extend(arrival)
        else:
            arrival()

    def _notify_drained(self) -> None:
        if not self._drain_waiters or self._scheduler.has_launched:
            return
        if not self._scheduler.num_running and not self._may_admit():
            self.gate.drained()
        if not self.gate.may_step or self.gate.may_admit:
            waiters, self._drain_waiters = self._drain_waiters, []
            for future in waiters:
                self._loop.call_soon_threadsafe(_settle, future, None)

    def _step(self) -> RoundResults:
        publication = self.publication
        if publication is None:
            raise RuntimeError("a request was admitted before any weights were published")
        results = RoundResults()
        failure: Exception | None = None
        try:
            if self.is_cache_outdated:
                self._scheduler.recompute(results)
                self.is_cache_outdated = False
            self._admit()
            if self._scheduler.num_running:
                self._scheduler.round(publication.id, results)
        except Exception as error:
            # Its traceback holds the tensors of the forward.
            failure = error.with_traceback(None)
        if failure is not None:
            self.is_cache_outdated = False
            self._recover(failure, results)
        self._requeue_preempted()
        return results

    def _recover(self, failure: Exception, results: RoundResults) -> None:
        """A forward failed as a whole. Without memory, its requests wait for a smaller cache; otherwise they fail, and the engine
        continues."""
        if is_out_of_memory(failure):
            try:
                if self._shrink_cache(str(failure), results):
                    return
            except Exception as error:
                failure = error
            advice = f"{failure}. {MEMORY_ADVICE}"
            preempted = self._scheduler.take_preempted()
            results.failed += [(request, GenerationError(f"out of memory: {advice}")) for request in preempted]
        results.failed += self._all_failed(failure).failed

    def _shrink_cache(self, cause: str, results: RoundResults) -> bool:
        """Preempt all requests and give a part of the cache back to the device. False: nothing more can be given back."""
        self._scheduler.preempt_all(results)
        if not self._scheduler.batch.shrink():
            return False
        self.shrinks += 1
        log.warning(
            "the device has no memory left: the cache of keys and values is smaller from now on, and requests wait for it. %s. "
            "Cause: %s",
            MEMORY_ADVICE,
            cause,
        )
        return True

    def shrink_cache(self, cause: str) -> None:
        """Between two rounds: give a part of the cache back, if it can be (`shrinks`). Only in the thread."""
        results = RoundResults()
        try:
            self._shrink_cache(cause, results)
        finally:
            self._requeue_preempted()
            self._report(results)

    def _requeue_preempted(self) -> None:
        """Preempted requests continue before all that wait."""
        preempted = self._scheduler.take_preempted()
        self._waiting.extendleft(reversed(preempted))
        self.admitted -= len(preempted)

    def _admit(self) -> None:
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
            self.admitted += 1
        if not self._may_admit():
            return
        count = self._scheduler.num_admissible(
            self._waiting if self.gate.may_admit else takewhile(_is_preempted, self._waiting)
        )
        admitted = [self._waiting.popleft() for _ in range(count)]
        self.admitted += count
        self._scheduler.join([request for request in admitted if not request.future.done()])

    def _return(self, outcomes: "list[Outcome]") -> None:
        if outcomes:
            self.completed += len(outcomes)
            self._loop.call_soon_threadsafe(_complete, outcomes)

    def _fail_all(self) -> None:
        """After the end of the thread, on the event loop."""
        self.is_closed = True
        error = EngineClosedError("the engine was closed before the request finished")
        while True:
            try:
                arrival = self._inbox.get_nowait()
            except Empty:
                break
            self._accept(arrival)
        remaining = [*self._scheduler.unfinished(), *self._waiting]
        self._waiting.clear()
        _complete([(request.future, error) for request in remaining])
        for waiter in self._drain_waiters:
            _settle(waiter, error)
        if self.failure is not None:
            self.on_failure()


def _is_preempted(waiting: GenerationRequest) -> bool:
    """Whether a waiting request had a row before."""
    return waiting.row >= 0


# --- called on the event loop by the thread ---

Outcome = tuple[asyncio.Future[Completion], Completion | Exception]


def _complete(outcomes: Sequence[Outcome]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _stream(chunks: Sequence[tuple[OnTokens, TokenChunk]]) -> None:
    for on_tokens, chunk in chunks:
        try:
            on_tokens(chunk)
        except Exception:  # The caller's code: its error must not affect other requests.
            log.exception("a token callback raised")


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
