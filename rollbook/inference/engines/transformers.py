"""The embedded engine: any Hugging Face causal language model, continuous batching, exact sampling logprobs.

One thread owns model and cache and runs steps; the event loop only hands requests over and takes answers back. All requests of one
turn of the event loop reach the thread in one batch, and all answers of one step come back in one call: crossing is cheap.
"""

import asyncio
import random
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, FinishReason, Publication, SamplingParams
from rollbook.contracts.weights import RawTensor, weights_digest
from rollbook.inference.batching import is_worth_prefilling
from rollbook.inference.busy import IDLE_GAP_S, BusyPeriods
from rollbook.inference.config import InferenceConfig, KvAfterUpdate
from rollbook.inference.engine import (
    EngineClosedError,
    EngineStats,
    GenerationError,
    OnTokens,
    QueueFullError,
    TensorSource,
    TokenChunk,
    UnpublishedError,
)
from rollbook.inference.engines.assembly import EngineParts, assemble
from rollbook.inference.engines.graph_runner import Capture
from rollbook.inference.engines.stepper import Finished
from rollbook.inference.gate import Gate, PauseMode, needs_loading, require_unpublished
from rollbook.inference.request import Request, checked_request
from rollbook.inference.tensors import require_published
from rollbook.inference.weight_file import read_published_weights
from rollbook.telemetry.spans import SpanRecorder

RETRY_FULL_S = 0.2
"""Advice to a client that met a full queue."""
GPU_SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while another wants it, beside a GPU. Python's own is ten times that."""

Order = Callable[[], None]
Answer = tuple[asyncio.Future[Completion], Completion | Exception]


@asynccontextmanager
async def open_engine(
    config: InferenceConfig,
    model_dir: Path | None,
    *,
    spans: SpanRecorder | None = None,
    capture: Capture | None = None,
) -> AsyncIterator["TransformersEngine"]:
    """Load the model and start the engine's thread. On leaving, requests that are still in it fail."""
    if model_dir is None:
        raise RunError("the transformers engine needs a model directory; none was given")
    torch.set_num_threads(config.threads)
    began = time.perf_counter()
    parts = await asyncio.to_thread(assemble, config, model_dir, capture=capture)
    engine = TransformersEngine(parts, config, loop=asyncio.get_running_loop(), spans=spans)
    thread = threading.Thread(target=engine.run, name="policy-engine", daemon=True)
    switch_s = sys.getswitchinterval()
    if parts.model.device.type == "cuda":
        # The thread that keeps the GPU busy must not wait long for the interpreter while HTTP is parsed.
        sys.setswitchinterval(GPU_SWITCH_S)
    thread.start()
    try:
        await engine.warm_up()
        engine.opening_s = time.perf_counter() - began
        yield engine
    finally:
        engine.close()
        await asyncio.to_thread(thread.join)
        sys.setswitchinterval(switch_s)


class TransformersEngine:
    """Made by `open_engine`. Public methods belong to the event loop, `run` to the thread."""

    def __init__(
        self,
        parts: EngineParts,
        config: InferenceConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        spans: SpanRecorder | None = None,
    ) -> None:
        self.parts = parts
        self.opening_s = 0.0
        self._model = parts.model
        self._weights = parts.weights
        self._stepper = parts.stepper
        self._config = config
        self._loop = loop
        self._rng = random.Random(config.seed)
        self._busy = BusyPeriods(spans)
        self._gate = Gate()
        self._publication: Publication | None = None
        self._updating = asyncio.Lock()
        # Bounded by max_queued, which `submit` checks against what was submitted and not yet admitted.
        self._inbox: SimpleQueue[Order | list[Request]] = SimpleQueue()
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._drained: list[asyncio.Future[None]] = []
        self._is_cache_outdated = False
        self._is_closed = False
        self._rounds_waited = 0
        # Each counter is written by one side only: `_submitted` by the event loop, the others by the thread.
        self._submitted = self._admitted = self._answered = self._tokens = self._steps = 0

    # --- the event loop's side ---

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def publication(self) -> Publication | None:
        return self._publication

    @property
    def is_paused(self) -> bool:
        return not self._gate.may_admit

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._stepper.num_running,
            queued=self._submitted - self._admitted,
            requests=self._answered,
            tokens=self._tokens,
            steps=self._steps,
            forwards=self.parts.runner.forwards,
            busy_s=self._busy.busy_s,
            kv_after_update=self._config.kv_after_update,
        )

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> asyncio.Future[Completion]:
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if self._publication is None:
            raise UnpublishedError("no weights were published to this engine yet, so it does not sample")
        if self._submitted - self._admitted >= self._config.max_queued:
            raise QueueFullError(
                f"{self._config.max_queued} requests wait already; try again later", retry_after_s=RETRY_FULL_S
            )
        answer: asyncio.Future[Completion] = self._loop.create_future()
        request = checked_request(
            prompt_ids,
            sampling,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            answer=answer,
            on_tokens=on_tokens,
        )
        request.order = self._submitted
        request.seed = self._rng.getrandbits(64) if sampling.seed is None else sampling.seed
        self._submitted += 1
        if not self._arrived and not self._cancelled:
            # The rest of this turn of the loop brings more of them: they cross together.
            self._loop.call_soon(self._hand_over)
        self._arrived.append(request)
        answer.add_done_callback(lambda future: self._cancel(request) if future.cancelled() else None)
        return answer

    async def warm_up(self) -> None:
        """Capture what can be captured ahead. Nothing runs yet."""

        def prepare() -> None:
            with torch.inference_mode():
                self.parts.runner.warm_up()

        await self._order(prepare)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self.submit(prompt_ids, sampling)

    async def load_weights(self, publication: Publication, path: Path) -> None:
        await self._load(publication, lambda: read_published_weights(path, publication))

    async def load_tensors(self, publication: Publication, tensors: Mapping[str, TensorSource]) -> None:
        def checked() -> Mapping[str, TensorSource]:
            require_published(publication, tensors)
            return tensors

        await self._load(publication, checked)

    async def _load(self, publication: Publication, read: Callable[[], Mapping[str, TensorSource]]) -> None:
        async with self._updating:
            if not needs_loading(self._publication, publication):
                return
            began = time.time()
            plan = await asyncio.to_thread(lambda: self._weights.plan(read()))

            def apply() -> None:
                self._weights.apply(plan)
                self._stepper.weights_changed()
                self._is_cache_outdated = self._config.kv_after_update is KvAfterUpdate.RECOMPUTE
                self._publication = publication
                self._busy.updated(began, publication=publication.id, step=publication.step)

            await self._order(apply)

    async def adopt(self, publication: Publication) -> None:
        async with self._updating:
            require_unpublished(self._publication, publication)
            self._publication = publication

    async def weights_digest(self) -> str:
        snapshot: list[RawTensor] = []
        await self._order(lambda: snapshot.extend(self._weights.snapshot()))
        return await asyncio.to_thread(weights_digest, snapshot)

    async def abort_all(self) -> int:
        count = 0

        def abort() -> None:
            nonlocal count
            self._tell(self._stepper.drain())
            requests = [r for r in [*self._stepper.clear(), *self._waiting] if not r.answer.done()]
            self._admitted += len(self._waiting)
            self._waiting.clear()
            count = len(requests)
            self._answer([(r.answer, r.completion(FinishReason.ABORT)) for r in requests])

        self._hand_over()
        await self._order(abort)
        return count

    async def pause(self, mode: PauseMode) -> None:
        drained: asyncio.Future[None] = self._loop.create_future()

        def pause() -> None:
            self._gate.pause(mode)
            if mode is PauseMode.ABORT:
                self._tell(self._stepper.drain())
                aborted = self._stepper.clear()
                self._answer([(r.answer, r.completion(FinishReason.ABORT)) for r in aborted])
            self._drained.append(drained)

        await self._order(pause)
        await drained

    async def resume(self) -> None:
        await self._order(self._gate.resume)

    def close(self) -> None:
        self._is_closed = True
        self._hand_over()
        self._inbox.put(_ignore)

    def _cancel(self, request: Request) -> None:
        """Somebody left. Called on the event loop; the thread frees the slot before its next step."""
        if not self._arrived and not self._cancelled:
            self._loop.call_soon(self._hand_over)
        self._cancelled.append(request)

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        cancelled, self._cancelled = self._cancelled, []
        if arrived:
            self._inbox.put(arrived)
        if cancelled:
            self._inbox.put(lambda: self._leave(cancelled))

    def _leave(self, cancelled: Sequence[Request]) -> None:
        """The thread's part of it. Who waits leaves the queue, too: the dead must not keep it full."""
        self._stepper.leave(cancelled)
        waiting = deque(request for request in self._waiting if not request.answer.done())
        self._admitted += len(self._waiting) - len(waiting)
        self._waiting = waiting

    async def _order(self, act: Order) -> None:
        """Have the thread do something between two steps; returns when it is done, raises what it raised."""
        done: asyncio.Future[None] = self._loop.create_future()

        def carry_out() -> None:
            try:
                act()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, None)

        self._inbox.put(carry_out)
        await done

    # --- the thread's side ---

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
                    self._tell(self._stepper.drain())
                self._settle_drain()
            self._busy.cut()
            self._fail_all(EngineClosedError("the engine was closed before it could answer"))

    def _device_stream(self) -> AbstractContextManager[object]:
        """On a GPU, everything of this thread goes to a stream of its own: captured steps need one."""
        if self._model.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.default_stream(self._model.device))
        return torch.cuda.stream(stream)

    def _round(self) -> None:
        """One step, its answers and its figures."""
        began = time.time()
        finished = self._step()
        self._steps += 1
        self._tell(finished)
        self._busy.step(
            began,
            time.time(),
            requests=len(finished.done),
            tokens=finished.tokens,
            publication=self._publication.id if self._publication else -1,
        )

    def _tell(self, finished: Finished) -> None:
        """What became known goes to those who wait for it."""
        self._tokens += finished.tokens
        told = [(r.on_tokens, chunk) for r in finished.told if r.on_tokens and (chunk := r.untold()) is not None]
        if told:
            self._loop.call_soon_threadsafe(_tell_all, told)
        self._answer([(r.answer, r.completion(reason)) for r, reason in finished.done])
        self._answer([(r.answer, error) for r, error in finished.failed])

    def _has_work(self) -> bool:
        return (bool(self._waiting) and self._gate.may_admit) or (self._stepper.num_running > 0 and self._gate.may_step)

    def _take_inbox(self) -> bool:
        """Everything that has arrived; waits for something only when there is no work. False once the engine is closed."""
        try:
            if not self._has_work() and not self._stepper.is_flying:
                self._take(self._wait_for_arrival())
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            return not self._is_closed

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
            self._gate.drained()
        if not self._gate.may_step or self._gate.may_admit:
            drained, self._drained = self._drained, []
            for future in drained:
                self._loop.call_soon_threadsafe(_settle, future, None)

    def _step(self) -> Finished:
        publication = self._publication
        if publication is None:
            raise RuntimeError("a request was admitted before any weights were published")
        finished = Finished()
        try:
            if self._is_cache_outdated:
                self._stepper.recompute(finished)
                self._is_cache_outdated = False
            self._admit()
            if self._stepper.num_running:
                self._stepper.round(publication.id, finished)
        except Exception as error:  # a forward failed as a whole: fail who was in it, and live
            self._is_cache_outdated = False
            message = (
                f"a forward of {self._stepper.num_running} running requests failed: {type(error).__name__}: {error}"
            )
            finished.failed.extend((request, GenerationError(message)) for request in self._stepper.clear())
        # Who made room goes on first.
        preempted = self._stepper.take_preempted()
        self._waiting.extendleft(reversed(preempted))
        self._admitted -= len(preempted)
        return finished

    def _admit(self) -> None:
        if not self._gate.may_admit:
            return
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()
            self._admitted += 1
        if not self._waiting:
            return
        stepper = self._stepper
        if not is_worth_prefilling(
            waiting=len(self._waiting),
            free_slots=self._config.max_running - stepper.num_running,
            running=stepper.num_running,
            rounds_waited=self._rounds_waited,
            gather=self.parts.gather,
        ):
            self._rounds_waited += 1
            return
        self._rounds_waited = 0
        count = stepper.room_for(len(r.prompt) + len(r.tokens) + 1 for r in self._waiting)
        admitted = [self._waiting.popleft() for _ in range(count)]
        self._admitted += count
        stepper.join([request for request in admitted if not request.answer.done()])

    def _answer(self, answers: list[Answer]) -> None:
        if answers:
            self._answered += len(answers)
            self._loop.call_soon_threadsafe(_deliver, answers)

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


def _deliver(answers: Sequence[Answer]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _tell_all(told: Sequence[tuple[OnTokens, TokenChunk]]) -> None:
    for on_tokens, chunk in told:
        on_tokens(chunk)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _ignore() -> None:
    """Wakes the thread."""
