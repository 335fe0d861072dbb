"""The thread that owns model and cache: takes requests and orders, runs rounds, gives answers.

All requests of one turn of the event loop reach it in one batch, and all answers of one round go back in one call: crossing is
cheap. Orders (pause, new weights, a look at the weights) are carried out between two rounds.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue

import torch

from rollbook.contracts.policy import FinishReason, Publication
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import EngineClosedError, GenerationError
from rollbook.inference.engines.batching import is_worth_prefilling
from rollbook.inference.engines.busy import IDLE_GAP_S, BusyPeriods
from rollbook.inference.engines.embedded.build import EngineParts
from rollbook.inference.engines.embedded.handoff import Answer, deliver, nothing, settle, tell_all
from rollbook.inference.engines.embedded.rounds import Finished
from rollbook.inference.pause import Gate, PauseMode
from rollbook.inference.request import Request

Order = Callable[[], None]

log = logging.getLogger(__name__)


class EngineThread:
    """`put`, `order`, `close` and the counters are for the event loop; everything else happens in `run`."""

    def __init__(
        self, parts: EngineParts, config: InferenceConfig, *, loop: asyncio.AbstractEventLoop, busy: BusyPeriods
    ) -> None:
        self.gate = Gate()
        self.publication: Publication | None = None
        self.is_cache_outdated = False
        self.is_closed = False
        # Written here only, read by the event loop.
        self.admitted = self.answered = self.tokens = self.steps = 0
        self._parts = parts
        self._stepper = parts.stepper
        self._config = config
        self._loop = loop
        self._busy = busy
        # Bounded by max_queued, which the engine checks against what was submitted and not yet admitted.
        self._inbox: SimpleQueue[Order | list[Request]] = SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._drained: list[asyncio.Future[None]] = []
        self._rounds_waited = 0

    # --- for the event loop ---

    def put(self, requests: list[Request], cancelled: list[Request]) -> None:
        if requests:
            self._inbox.put(requests)
        if cancelled:
            self._inbox.put(lambda: self._leave(cancelled))

    async def order(self, act: Order) -> None:
        """Have the thread do something between two steps; returns when it is done, raises what it raised."""
        done: asyncio.Future[None] = self._loop.create_future()

        def carry_out() -> None:
            try:
                act()
            except Exception as error:
                self._loop.call_soon_threadsafe(settle, done, error)
            else:
                self._loop.call_soon_threadsafe(settle, done, None)

        self._inbox.put(carry_out)
        await done

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is being sampled any more."""
        drained: asyncio.Future[None] = self._loop.create_future()

        def pause() -> None:
            self.gate.pause(mode)
            if mode is PauseMode.ABORT:
                self._abort(with_waiting=False)
            self._drained.append(drained)

        await self.order(pause)
        await drained

    async def abort_all(self) -> int:
        counted: list[int] = []
        await self.order(lambda: counted.append(self._abort(with_waiting=True)))
        return counted[0]

    def close(self) -> None:
        self.is_closed = True
        self._inbox.put(nothing)

    # --- in the thread ---

    def run(self) -> None:
        """Step while there is work, until closed.

        Takes:  requests and orders, from the inbox.
        Gives:  answers, through the event loop.
        Waits:  for the inbox, when nothing runs or may run.
        Ends:   after `close`; requests that are still here fail.
        """
        with self._device_stream():
            while self._take_inbox():
                if self._has_work():
                    self._round()
                elif self._stepper.is_flying:
                    self._hear_all()
                self._settle_drain()
            self._busy.cut()
            self._fail_all(EngineClosedError("the engine was closed before it could answer"))

    def _leave(self, cancelled: Sequence[Request]) -> None:
        """The thread's part of it. Who waits leaves the queue, too: the dead must not keep it full."""
        self._stepper.leave(cancelled)
        waiting = deque(request for request in self._waiting if not request.answer.done())
        self.admitted += len(self._waiting) - len(waiting)
        self._waiting = waiting

    def _abort(self, *, with_waiting: bool) -> int:
        self._hear_all()
        ended = self._stepper.clear()
        if with_waiting:
            ended += self._waiting
            self.admitted += len(self._waiting)
            self._waiting.clear()
        ended = [request for request in ended if not request.answer.done()]
        self._answer([(request.answer, request.completion(FinishReason.ABORT)) for request in ended])
        return len(ended)

    def _hear_all(self) -> None:
        """Wait for what was launched. A device that fails here fails those whose tokens were under way."""
        try:
            self._tell(self._stepper.drain())
        except Exception as error:
            self._tell(self._all_failed(error))

    def _all_failed(self, error: Exception) -> Finished:
        message = f"a forward of {self._stepper.num_running} running requests failed: {type(error).__name__}: {error}"
        return Finished(failed=[(request, GenerationError(message)) for request in self._stepper.clear()])

    def _device_stream(self) -> AbstractContextManager[object]:
        """On a GPU, everything of this thread goes to a stream of its own: captured steps need one."""
        if self._parts.model.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self._parts.model.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.default_stream(self._parts.model.device))
        return torch.cuda.stream(stream)

    def _round(self) -> None:
        """One step, its answers and its figures."""
        began = time.time()
        finished = self._step()
        self.steps += 1
        self._tell(finished)
        self._busy.step(
            began,
            time.time(),
            requests=len(finished.done),
            tokens=finished.tokens,
            publication=self.publication.id if self.publication else -1,
        )

    def _tell(self, finished: Finished) -> None:
        """What became known goes to those who wait for it."""
        self.tokens += finished.tokens
        told = [(r.on_tokens, chunk) for r in finished.told if r.on_tokens and (chunk := r.untold()) is not None]
        if told:
            self._loop.call_soon_threadsafe(tell_all, told)
        self._answer([(r.answer, r.completion(reason)) for r, reason in finished.done])
        self._answer([(r.answer, error) for r, error in finished.failed])

    def _has_work(self) -> bool:
        return (bool(self._waiting) and self.gate.may_admit) or (self._stepper.num_running > 0 and self.gate.may_step)

    def _take_inbox(self) -> bool:
        """Everything that has arrived; waits for something only when there is no work. False once the engine is closed."""
        try:
            if not self._has_work() and not self._stepper.is_flying:
                self._take(self._wait_for_arrival())
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            return not self.is_closed

    def _wait_for_arrival(self) -> Order | list[Request]:
        if self._busy.is_open:
            try:
                return self._inbox.get(timeout=IDLE_GAP_S)
            except Empty:
                self._busy.cut()
        return self._inbox.get()

    def _take(self, arrival: Order | list[Request]) -> None:
        if isinstance(arrival, list):
            self._waiting.extend(arrival)
        else:
            arrival()

    def _settle_drain(self) -> None:
        if not self._drained:
            return
        if self._stepper.is_flying:
            return
        if not self._stepper.num_running:
            self.gate.drained()
        if not self.gate.may_step or self.gate.may_admit:
            drained, self._drained = self._drained, []
            for future in drained:
                self._loop.call_soon_threadsafe(settle, future, None)

    def _step(self) -> Finished:
        publication = self.publication
        if publication is None:
            raise RuntimeError("a request was admitted before any weights were published")
        finished = Finished()
        try:
            if self.is_cache_outdated:
                self._stepper.recompute(finished)
                self.is_cache_outdated = False
            self._admit()
            if self._stepper.num_running:
                self._stepper.round(publication.id, finished)
        except Exception as error:  # a forward failed as a whole: fail who was in it, and live
            self.is_cache_outdated = False
            finished.failed += self._all_failed(error).failed
        # Who made room goes on first.
        preempted = self._stepper.take_preempted()
        self._waiting.extendleft(reversed(preempted))
        self.admitted -= len(preempted)
        return finished

    def _admit(self) -> None:
        if not self.gate.may_admit:
            return
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()
            self.admitted += 1
        if not self._waiting:
            return
        stepper = self._stepper
        if not is_worth_prefilling(
            waiting=len(self._waiting),
            free_slots=self._config.max_running - stepper.num_running,
            running=stepper.num_running,
            rounds_waited=self._rounds_waited,
            gather=self._parts.gather,
        ):
            self._rounds_waited += 1
            return
        self._rounds_waited = 0
        count = stepper.room_for(len(r.prompt) + len(r.tokens) + 1 for r in self._waiting)
        admitted = [self._waiting.popleft() for _ in range(count)]
        self.admitted += count
        stepper.join([request for request in admitted if not request.answer.done()])

    def _answer(self, answers: list[Answer]) -> None:
        if answers:
            self.answered += len(answers)
            self._loop.call_soon_threadsafe(deliver, answers)

    def _fail_all(self, error: Exception) -> None:
        while True:
            try:
                arrival = self._inbox.get_nowait()
            except Empty:
                break
            self._take(arrival)
        left = [*self._stepper.clear(), *self._waiting]
        self._waiting.clear()
        self._answer([(request.answer, error) for request in left])
