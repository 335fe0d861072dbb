"""The embedded engine: any Hugging Face causal language model, continuous batching, exact sampling logprobs.

One thread (`thread.py`) owns model and cache and runs rounds; the event loop only submits requests and receives completions.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from rollbook.concurrency.gpu_launches import prompt_launches
from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.policy import Completion, OnTokens, Publication, SamplerExactness, SamplingParams, TokenIds
from rollbook.contracts.weights import Adapter, TensorSource, WeightsError
from rollbook.inference.config import InferenceConfig, KvAfterUpdate
from rollbook.inference.engine import (
    BASE_MODEL,
    EngineClosedError,
    EngineQueueFullError,
    EngineStats,
    ProbeComparison,
    PromptScores,
    TokenConstraint,
    UnknownAdapterError,
    UnpublishedError,
)
from rollbook.inference.engines.busy import BusyPeriods
from rollbook.inference.engines.embedded.adapters import BASE, POLICY
from rollbook.inference.engines.embedded.build import EngineParts, build_parts
from rollbook.inference.engines.embedded.live_weights import LoadPlan
from rollbook.inference.engines.embedded.model.capture import Capture
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.model.module import score_prompt
from rollbook.inference.engines.embedded.probe import batch_dependent, probe
from rollbook.inference.engines.embedded.thread import HALF_LOADED, MEMORY_ADVICE, EngineThread
from rollbook.inference.pause import PauseMode, needs_loading, require_unpublished
from rollbook.inference.request import GenerationRequest, checked_prompt, checked_request
from rollbook.inference.weights.safetensors import read_published_weights, require_published
from rollbook.numerics.device_memory import release_memory
from rollbook.numerics.machine import machine_of_bits
from rollbook.telemetry.spans import SpanRecorder

log = logging.getLogger(__name__)

T = TypeVar("T")

EXACTNESS_ADVICE = (
    "The engine serves all the same. docs/engine.md names versions of torch with which they were exact; to do without, set "
    "inference.exactness and trainer.exactness to 'fast'"
)
RETRY_FULL_S = 0.2
"""Retry advice for a client when the queue is full."""
MAX_NAMED = 16
"""Named adapters. A step with several adapters computes all of them for every row."""
FLUSH_AT = 32
"""Requests submitted together are passed to the engine's thread in parts of this size, so that it starts before the last one."""


@asynccontextmanager
async def open_engine(
    config: InferenceConfig,
    model_dir: Path | None,
    *,
    spans: SpanRecorder | None = None,
    capture: Capture | None = None,
    shared_base: Path | None = None,
    compare: ProbeComparison | None = None,
) -> AsyncIterator["TransformersEngine"]:
    """Load the model and start the engine's thread. On exit, the remaining requests fail. `compare`: see `check_exactness`.

    If the thread fails, the task that entered is cancelled, and the exit raises the cause.
    """
    if model_dir is None:
        raise RunError("the transformers engine needs a model directory")
    torch.set_num_threads(config.threads)
    started = time.perf_counter()
    parts = await asyncio.to_thread(build_parts, config, model_dir, capture=capture, shared_base=shared_base)
    engine = TransformersEngine(parts, config, loop=asyncio.get_running_loop(), spans=spans)
    thread = threading.Thread(target=engine.thread.run, name="policy-engine", daemon=True)
    owner = asyncio.current_task()
    assert owner is not None
    engine.thread.on_failure = owner.cancel
    thread.start()
    try:
        await engine.warm_up()
        if compare is not None and parts.inexact_because is None:
            await engine.check_exactness(compare)
        engine.opening_s = time.perf_counter() - started
        with prompt_launches() if parts.model.device.type == "cuda" else nullcontext():
            yield engine
    except asyncio.CancelledError:
        if engine.thread.failure is None:
            raise
        owner.uncancel()
        raise engine.thread.failure from None
    finally:
        engine.close()
        await asyncio.to_thread(thread.join)


class TransformersEngine:
    """Made by `open_engine`. Its methods are called on the event loop."""

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
        self._machine = machine_of_bits(parts.model.device.type)
        self._inexact_because = parts.inexact_because
        self._config = config
        self._loop = loop
        self._rng = random.Random(config.seed)
        self._busy = BusyPeriods(spans)
        self.thread = EngineThread(parts, config, loop=loop, busy=self._busy)
        self._updating = asyncio.Lock()
        self._named: dict[str, int] = {}
        """The slots of the named adapters."""
        self._has_other_digest = False
        """The weights in use do not have the published digest. The same publication is then loaded again."""
        # One thread for all updates, because a GPU library initialises itself once for each thread.
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy-staging")
        self._arrived: list[GenerationRequest] = []
        self._cancelled: list[GenerationRequest] = []
        self._submitted = 0

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def publication(self) -> Publication | None:
        return self.thread.publication

    @property
    def adapter(self) -> Adapter | None:
        return self.parts.weights.adapter

    @property
    def named_adapters(self) -> Collection[str]:
        return self._named.keys()

    @property
    def is_paused(self) -> bool:
        return not self.thread.gate.may_admit

    @property
    def exactness(self) -> SamplerExactness:
        return SamplerExactness(
            inexact_because=self._inexact_because,
            recomputes=self._config.kv_after_update is KvAfterUpdate.RECOMPUTE,
            machine=self._machine,
        )

    async def check_exactness(self, compare: ProbeComparison) -> None:
        """Before the first request: sample a few answers, and compare their logprobs with those of a trainer.

        If `compare` finds a difference, the engine does not call itself exact, and the log says what differs, which operations
        depend on the batch, and what to do.
        """
        model, found = self._model, list[str]()

        def check() -> None:
            answers = probe(self.parts.scheduler, vocab_size=model.vocab_size, max_model_len=model.max_model_len)
            if (difference := compare(self.parts.module, answers)) is not None:
                found.extend([difference, *(batch_dependent(model) if isinstance(model, LlamaForward) else [])])

        try:
            await self.thread.between_rounds(check)
        except Exception as error:  # a check must not end what it checks; the trainer compares tokens in every step
            log.warning("exact logprobs could not be checked at the start: %s: %s", type(error).__name__, error)
            return
        finally:
            await self.thread.between_rounds(release_memory)
        if not found:
            log.info("exact logprobs: checked at the start")
            return
        self._inexact_because = "the check at its start found other bits than the trainer's"
        difference, *operations = found
        cause = (
            f"The bits of a row depend on the number of rows in: {'; '.join(operations)}"
            if operations
            else "Products, norms and gates do not depend on the number of rows, so attention or the sampling of tokens does"
        )
        log.warning(
            "logprobs are not exact: %s. %s (%s; %s). %s",
            difference,
            cause,
            ", ".join(f"{name} {value}" for name, value in self._machine.items()),
            "; ".join(self.parts.choices),
            EXACTNESS_ADVICE,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.parts.scheduler.num_running,
            queued=self._submitted - self.thread.admitted,
            requests=self.thread.completed,
            tokens=self.thread.tokens,
            steps=self.thread.steps,
            forwards=self.parts.runner.forwards,
            busy_s=self._busy.busy_s,
            kv_after_update=self._config.kv_after_update,
            cached_tokens=self.parts.scheduler.batch.cached_tokens,
            drafted_tokens=self.parts.scheduler.drafted,
            accepted_tokens=self.parts.scheduler.accepted,
            cache_shrinks=self.thread.shrinks,
        )

    def submit(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        on_tokens: OnTokens | None = None,
        constraint: TokenConstraint | None = None,
        adapter: str | None = None,
    ) -> asyncio.Future[Completion]:
        self._require_weights()
        if self._submitted - self.thread.admitted >= self._config.max_queued:
            raise EngineQueueFullError(
                f"the queue is full ({self._config.max_queued} requests); try again later", retry_after_s=RETRY_FULL_S
            )
        future: asyncio.Future[Completion] = self._loop.create_future()
        request = checked_request(
            prompt_ids,
            sampling,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            future=future,
            on_tokens=on_tokens,
            constraint=constraint,
            adapter=self._slot(adapter),
        )
        request.order = self._submitted
        request.seed = self._rng.getrandbits(64) if sampling.seed is None else sampling.seed
        self._submitted += 1
        self._schedule_flush()
        self._arrived.append(request)
        if len(self._arrived) >= FLUSH_AT:
            self._flush()
        future.add_done_callback(lambda done: self._cancel(request) if done.cancelled() else None)
        return future

    async def warm_up(self) -> None:
        """Capture graphs before the first request: at once, or with the first adapter if adapters will be published."""
        if self._config.publish != "adapter" or self.adapter is not None:
            await self._fitting(lambda: self.thread.between_rounds(self._warm_up), "for its steps")

    def _warm_up(self) -> None:
        with torch.inference_mode():
            self.parts.runner.warm_up()

    async def generate(
        self, prompt_ids: TokenIds, sampling: SamplingParams, *, adapter: str | None = None
    ) -> Completion:
        return await self.submit(prompt_ids, sampling, adapter=adapter)

    async def score(self, prompt_ids: TokenIds, *, top_logprobs: int = 0, adapter: str | None = None) -> PromptScores:
        self._require_weights()
        prompt = checked_prompt(prompt_ids, vocab_size=self.vocab_size, max_length=self.max_model_len)
        bank, slot = self._model.adapters, self._slot(adapter)
        scores: list[PromptScores] = []

        def score() -> None:
            with bank.in_module(bank.rows(np.array([slot], dtype=np.int32))):
                found = score_prompt(self.parts.module, prompt, top_logprobs)
                publication = self.thread.publication
                scores.append(replace(found, publication=None if publication is None else publication.id))

        await self.thread.between_rounds(score)
        return scores[0]

    def _slot(self, adapter: str | None) -> int:
        if adapter is None:
            return POLICY
        if adapter == BASE_MODEL:
            return BASE
        if adapter not in self._named:
            raise UnknownAdapterError(
                f"no adapter {adapter!r} is loaded; loaded are: {', '.join(self._named) or 'none'}"
            )
        return self._named[adapter]

    def _require_weights(self) -> None:
        if self.thread.is_closed:
            raise EngineClosedError("the engine is closed")
        if self.thread.publication is None:
            raise UnpublishedError("no weights were published to this engine yet, so it does not sample")
        if self.thread.is_half_loaded:
            raise UnpublishedError(HALF_LOADED)

    async def load_weights(self, publication: Publication, path: Path, *, adapter: Adapter | None = None) -> None:
        await self._load(publication, lambda: self._plan(read_published_weights(path, publication), adapter))

    async def load_tensors(
        self, publication: Publication, tensors: Mapping[str, TensorSource], *, adapter: Adapter | None = None
    ) -> None:
        def plan() -> LoadPlan:
            require_published(publication, tensors)
            return self._plan(tensors, adapter)

        await self._load(publication, plan)

    async def load_adapter(self, adapter: Adapter, tensors: Mapping[str, TensorSource]) -> None:
        async with self._updating:
            used = set(self._named.values())
            slot = self._named.get(adapter.name) or next(n for n in count(POLICY + 1) if n not in used)
            if slot > MAX_NAMED:
                raise WeightsError(f"{MAX_NAMED} adapters are loaded, which is the limit; unload one first")
            plan = await self._planned(lambda: self.parts.weights.plan_adapter(adapter, tensors, slot=slot))
            await self._applied(lambda: self._apply(plan))
            self._named[adapter.name] = slot

    async def remove_adapter(self, name: str) -> None:
        async with self._updating:
            slot = self._slot(name)
            del self._named[name]
            # Requests that were submitted before must reach the thread before the adapter leaves it.
            self._flush()
            plan = await self._staged(lambda: self.parts.weights.plan_removal(slot))

            def apply() -> None:
                self.thread.fail_adapters([slot], UnknownAdapterError(f"adapter {name!r} was unloaded"))
                self._apply(plan)

            await self.thread.between_rounds(apply)

    def _apply(self, plan: LoadPlan) -> None:
        """In the engine's thread."""
        generation = self._model.adapters.generation
        self.parts.weights.apply(plan)
        self.parts.scheduler.weights_changed()
        if self._model.adapters.generation != generation:
            try:
                self._warm_up()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("no memory to capture all steps now; they are captured when they are used (%s)", error)

    async def base_digest(self) -> str:
        async with self._updating:
            return await self._staged(self.parts.weights.base_digest)

    async def _staged(self, function: Callable[[], T]) -> T:
        """Run a function in the thread for updates."""
        if self.thread.is_closed:
            raise EngineClosedError("the engine is closed")
        return await self._loop.run_in_executor(self._stager, function)

    async def _planned(self, make_plan: Callable[[], LoadPlan]) -> LoadPlan:
        """Stage an update."""
        return await self._fitting(lambda: self._staged(make_plan), "for the new weights")

    async def _applied(self, apply: Callable[[], None]) -> None:
        """Apply a staged update between two rounds. A repetition copies everything again."""
        await self._fitting(lambda: self.thread.between_rounds(apply), "to apply the new weights")

    async def _fitting(self, work: Callable[[], Awaitable[T]], purpose: str) -> T:
        """Do the work. While the device has no memory for it, the cache gets smaller."""
        while True:
            try:
                return await work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                cause = str(error)
            before = self.thread.shrinks
            await self.thread.between_rounds(partial(self.thread.shrink_cache, cause))
            if self.thread.shrinks == before:
                raise WeightsError(
                    f"the policy server has no memory {purpose} on {self._model.device}: {cause}. {MEMORY_ADVICE}"
                )

    def _plan(self, tensors: Mapping[str, TensorSource], adapter: Adapter | None) -> LoadPlan:
        weights = self.parts.weights
        return weights.plan(tensors) if adapter is None else weights.plan_adapter(adapter, tensors)

    async def _load(self, publication: Publication, make_plan: Callable[[], LoadPlan]) -> None:
        async with self._updating:
            is_intact = not self._has_other_digest and not self.thread.is_half_loaded
            if not needs_loading(self.thread.publication, publication) and is_intact:
                return
            started = time.time()
            plan = await self._planned(make_plan)
            named = list(self._named.values()) if plan.is_new_base else []
            if named:
                self._named = {}
                self._flush()

            def apply() -> None:
                self.thread.fail_adapters(
                    named, UnknownAdapterError("the adapter was unloaded, because its base model was replaced")
                )
                self.thread.is_half_loaded = True
                self._apply(plan)
                self.thread.is_half_loaded = self._has_other_digest = False
                self.thread.is_cache_outdated = self._config.kv_after_update is KvAfterUpdate.RECOMPUTE
                self.thread.publication = publication
                self._busy.updated(started, publication=publication.id, step=publication.step)

            try:
                await self._applied(apply)
            except BaseException:
                self.thread.end_if_half_loaded()
                raise

    async def adopt(self, publication: Publication) -> None:
        async with self._updating:
            require_unpublished(self.thread.publication, publication)
            self.thread.publication = publication

    async def weights_digest(self) -> str:
        """Runs in the staging thread, on a separate stream: decoding continues."""
        weights = self.parts.weights
        async with self._updating:
            publication, is_comparable = self.thread.publication, weights.is_comparable
            digest = await self._staged(weights.digest)
            if publication is not None and is_comparable:
                self._has_other_digest = digest != publication.digest
        return digest

    async def abort_all(self) -> int:
        self._flush()
        return await self.thread.abort_all()

    async def pause(self, mode: PauseMode) -> None:
        await self.thread.pause(mode)

    async def resume(self) -> None:
        await self.thread.between_rounds(self.thread.gate.resume)

    def close(self) -> None:
        self._flush()
        self.thread.close()
        self._stager.shutdown(wait=False)

    def _cancel(self, request: GenerationRequest) -> None:
        """The thread frees the slot before its next step."""
        self._schedule_flush()
        self._cancelled.append(request)

    def _schedule_flush(self) -> None:
        """The requests of one event loop iteration are passed to the thread together, `FLUSH_AT` at most."""
        if not self._arrived and not self._cancelled:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        arrived, self._arrived = self._arrived, []
        cancelled, self._cancelled = self._cancelled, []
        self.thread.enqueue(arrived, cancelled)
