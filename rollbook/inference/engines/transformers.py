"""The embedded engine: any Hugging Face causal language model, continuous batching, exact sampling logprobs.

One thread owns model and cache and runs steps; the event loop only hands requests over and takes answers back. All requests of one
turn of the event loop reach the thread in one batch, and all answers of one step come back in one call: crossing is cheap.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, FinishReason, Publication, SamplingParams
from rollbook.contracts.weights import RawTensor, weights_digest
from rollbook.inference.batching import admissible
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
from rollbook.inference.engines.causal_lm import CausalLM
from rollbook.inference.engines.stepper import Finished, Stepper
from rollbook.inference.gate import Gate, PauseMode, needs_loading, require_unpublished
from rollbook.inference.request import Request, checked_request
from rollbook.inference.tensors import require_published
from rollbook.inference.weight_file import read_published_weights
from rollbook.telemetry.spans import SpanRecorder

RETRY_FULL_S = 0.2
"""Advice to a client that met a full queue."""

Order = Callable[[], None]
Answer = tuple[asyncio.Future[Completion], Completion | Exception]


@asynccontextmanager
async def open_engine(
    config: InferenceConfig, model_dir: Path | None, *, spans: SpanRecorder | None = None
) -> AsyncIterator["TransformersEngine"]:
    """Load the model and start the engine's thread. On leaving, requests that are still in it fail."""
    if model_dir is None:
        raise RunError("the transformers engine needs a model directory; none was given")
    torch.set_num_threads(config.threads)
    model = await asyncio.to_thread(
        CausalLM.load, model_dir, device=config.device, dtype=config.dtype, max_model_len=config.max_model_len
    )
    engine = TransformersEngine(model, config, loop=asyncio.get_running_loop(), spans=spans)
    thread = threading.Thread(target=engine.run, name="policy-engine", daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.close()
        await asyncio.to_thread(thread.join)


class TransformersEngine:
    """Made by `open_engine`. Public methods belong to the event loop, `run` to the thread."""

    def __init__(
        self,
        model: CausalLM,
        config: InferenceConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        spans: SpanRecorder | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._loop = loop
        self._stepper = Stepper(
            model,
            max_running=config.max_running,
            forward_tokens=config.forward_tokens,
            memo_bytes=int(config.prompt_memo_mb * 1_000_000),
            seed=config.seed,
        )
        self._busy = BusyPeriods(spans)
        self._gate = Gate()
        self._publication: Publication | None = None
        self._updating = asyncio.Lock()
        # Bounded by max_queued, which `submit` checks against what was submitted and not yet admitted.
        self._inbox: SimpleQueue[Order | list[Request]] = SimpleQueue()
        self._arrived: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._drained: list[asyncio.Future[None]] = []
        self._is_cache_outdated = False
        self._is_closed = False
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
            running=len(self._stepper.running),
            queued=self._submitted - self._admitted,
            requests=self._answered,
            tokens=self._tokens,
            steps=self._steps,
            forwards=self._stepper.forwards,
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
        self._submitted += 1
        if not self._arrived:
            # The rest of this turn of the loop brings more of them: they cross together.
            self._loop.call_soon(self._hand_over)
        self._arrived.append(request)
        return answer

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
            plan = await asyncio.to_thread(lambda: self._model.plan_load(read()))

            def apply() -> None:
                self._model.apply_load(plan)
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
        await self._order(lambda: snapshot.extend(self._model.snapshot()))
        return await asyncio.to_thread(weights_digest, snapshot)

    async def abort_all(self) -> int:
        count = 0

        def abort() -> None:
            nonlocal count
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

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._inbox.put(arrived)

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
        while self._take_inbox():
            if self._has_work():
                self._round()
            self._settle_drain()
        self._busy.cut()
        self._fail_all(EngineClosedError("the engine was closed before it could answer"))

    def _round(self) -> None:
        """One step, its answers and its figures."""
        began = time.time()
        finished = self._step()
        self._steps += 1
        self._tokens += finished.tokens
        self._busy.step(
            began,
            time.time(),
            requests=len(finished.done),
            tokens=finished.tokens,
            publication=self._publication.id if self._publication else -1,
        )
        self._tell([*self._stepper.running, *(r for r, _ in finished.done)])
        self._answer([(r.answer, r.completion(reason)) for r, reason in finished.done])
        self._answer([(r.answer, error) for r, error in finished.failed])

    def _has_work(self) -> bool:
        return (bool(self._waiting) and self._gate.may_admit) or (bool(self._stepper.running) and self._gate.may_step)

    def _take_inbox(self) -> bool:
        """Everything that has arrived; waits for something only when there is no work. False once the engine is closed."""
        try:
            if not self._has_work():
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
        if not self._stepper.running:
            self._gate.drained()
        if not self._gate.may_step or self._gate.may_admit:
            drained, self._drained = self._drained, []
            for future in drained:
                self._loop.call_soon_threadsafe(_settle, future, None)

    def _step(self) -> Finished:
        self._stepper.drop_cancelled()
        joining = self._admit()
        publication = self._publication
        if publication is None:
            raise RuntimeError("a request was admitted before any weights were published")
        try:
            if self._is_cache_outdated and self._stepper.running:
                self._stepper.recompute()
            self._is_cache_outdated = False
            return self._stepper.step(joining, publication.id)
        except Exception as error:  # a forward failed as a whole: fail who was in it, and live
            message = (
                f"a forward of {len(joining)} new and the running requests failed: {type(error).__name__}: {error}"
            )
            lost = {id(r): r for r in [*joining, *self._stepper.clear()] if not r.answer.done()}
            return Finished(failed=[(request, GenerationError(message)) for request in lost.values()])

    def _admit(self) -> list[Request]:
        if not self._gate.may_admit:
            return []
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()
            self._admitted += 1
        count = admissible(
            (len(request.prompt) for request in self._waiting),
            free_slots=self._config.max_running - len(self._stepper.running),
            max_tokens=self._config.step_prefill_tokens,
        )
        admitted = [self._waiting.popleft() for _ in range(count)]
        self._admitted += count
        return [request for request in admitted if not request.answer.done()]

    def _tell(self, requests: Sequence[Request]) -> None:
        told = [(r.on_tokens, chunk) for r in requests if r.on_tokens is not None and (chunk := r.untold()) is not None]
        if told:
            self._loop.call_soon_threadsafe(_tell_all, told)

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
