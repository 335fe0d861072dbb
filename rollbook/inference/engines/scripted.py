"""The engine without a model: completions come from a script or from a seeded random policy.

It implements the whole engine protocol (steps, slots, stamps, pause, updates in flight), so tests, docs and benchmarks run the
system in seconds. Its logprobs are exact: 0 for a script, and uniform over the vocabulary for the random policy.
"""

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    OnTokens,
    Publication,
    SamplerExactness,
    SamplingParams,
    TokenIds,
    TopLogprobs,
)
from rollbook.contracts.weights import Adapter, TensorSource
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import (
    BASE_MODEL,
    EngineClosedError,
    EngineQueueFullError,
    EngineStats,
    GenerationError,
    PromptScores,
    TokenConstraint,
    UnknownAdapterError,
    UnpublishedError,
)
from rollbook.inference.engines.batching import admissible
from rollbook.inference.engines.busy import BusyPeriods
from rollbook.inference.pause import Gate, PauseMode, needs_loading, require_unpublished
from rollbook.inference.request import GenerationRequest, checked_prompt, checked_request, seeded_uniforms
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs
from rollbook.inference.weights.safetensors import read_published_weights, require_published
from rollbook.telemetry.spans import SpanRecorder

ROUND_TOKENS = 16_384
"""Default maximum of prompt tokens that join in a step."""

Reply = Sequence[int]
Script = Mapping[tuple[int, ...], Reply] | Callable[[Sequence[int]], Reply]
"""Maps a prompt to the tokens of its completion. If it is shorter than the limit, it ends as `stop`."""


@asynccontextmanager
async def open_engine(
    config: InferenceConfig,
    model_dir: Path | None = None,
    *,
    spans: SpanRecorder | None = None,
    script: Script | None = None,
    clock: Clock | None = None,
) -> AsyncIterator["ScriptedEngine"]:
    """`model_dir` is passed to the configured script, if there is one."""
    if script is None and config.scripted.script is not None:
        script = load_script(config.scripted.script, model_dir)
    engine = ScriptedEngine(config, script=script, clock=clock, spans=spans)
    task = asyncio.get_running_loop().create_task(engine.run(), name="policy.scripted")
    try:
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def load_script(path: str, model_dir: Path | None) -> Script:
    make = load_plugin(path, setting="inference.scripted.script")
    try:
        script: Script = make(model_dir)
    except Exception as error:  # User code may raise anything.
        raise RunError(
            f"inference.scripted.script: {path!r} returned no script: {type(error).__name__}: {error}"
        ) from error
    return script


class _Running:
    """A running request. Its tokens are drawn when it starts, but with a grammar each token decides which ones may follow."""

    __slots__ = ("drawn", "due_step", "first_step", "logprob", "reason", "reply", "request")

    def __init__(self, request: GenerationRequest, reply: Reply | None, *, first_step: int) -> None:
        self.request = request
        self.reply = reply
        self.first_step = self.due_step = first_step
        """The step of its first token, and the next step in which its tokens are needed."""
        self.drawn: NDArray[np.int32] | None = None
        """All tokens of the completion; None with a grammar."""
        self.logprob = 0.0
        self.reason = FinishReason.LENGTH

    def draw(self, tokens: NDArray[np.int32]) -> None:
        """Set the tokens of the completion, which ends with the first stop token."""
        request = self.request
        if request.sampling.stop_token_ids:
            stops = np.flatnonzero(np.isin(tokens, list(request.sampling.stop_token_ids)))
            if len(stops):
                tokens = tokens[: stops[0] + 1]
                self.reason = FinishReason.STOP
        self.drawn = tokens
        if request.on_tokens is None and not request.sampling.top_logprobs:
            self.due_step += len(tokens) - 1

    def add_drawn(self, *, next_step: int, publication: int) -> None:
        """Give the request its tokens of the steps before `next_step`. `publication` has sampled all that it does not have yet."""
        request = self.request
        if self.drawn is not None:
            new = self.drawn[len(request.tokens) : next_step - self.first_step]
            request.tokens.frombytes(new.tobytes())
            request.logprobs.extend([self.logprob] * len(new))
            request.versions.extend([publication] * len(new))


class ScriptedEngine:
    """Made by `open_engine`. Runs on the event loop."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        script: Script | None = None,
        clock: Clock | None = None,
        spans: SpanRecorder | None = None,
    ) -> None:
        self._config = config
        self._script = script
        self._clock = clock or SystemClock()
        self._busy = BusyPeriods(spans)
        self._rng = random.Random(config.seed)
        self._gate = Gate()
        self._publication: Publication | None = None
        self._adapter: Adapter | None = None
        self._named: set[str] = set()
        self._updating = asyncio.Lock()
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[_Running] = []
        self._woken = asyncio.Event()
        self._drained = asyncio.Event()
        self._requests = self._tokens = self._steps = 0
        self._is_closed = False

    @property
    def vocab_size(self) -> int:
        return self._config.scripted.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len or self._config.scripted.max_model_len

    @property
    def publication(self) -> Publication | None:
        return self._publication

    @property
    def adapter(self) -> Adapter | None:
        return self._adapter

    @property
    def named_adapters(self) -> Collection[str]:
        return self._named

    @property
    def is_paused(self) -> bool:
        return not self._gate.may_admit

    @property
    def exactness(self) -> SamplerExactness:
        return SamplerExactness(inexact_because="the scripted engine has no model")

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            queued=len(self._waiting),
            requests=self._requests,
            tokens=self._tokens,
            steps=self._steps,
            forwards=self._steps,
            busy_s=self._busy.busy_s,
            kv_after_update=self._config.kv_after_update,
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
        self._require_open()
        self._require_adapter(adapter)
        if self._publication is None:
            raise UnpublishedError("no weights were published to this engine yet, so it does not sample")
        if len(self._waiting) >= self._config.max_queued:
            raise EngineQueueFullError(
                f"the queue is full ({self._config.max_queued} requests); try again later", retry_after_s=0.2
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = checked_request(
            prompt_ids,
            sampling,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            future=future,
            on_tokens=on_tokens,
            constraint=constraint,
        )
        request.seed = self._rng.getrandbits(64) if sampling.seed is None else sampling.seed
        self._waiting.append(request)
        self._woken.set()
        return future

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed")

    def _require_adapter(self, name: str | None) -> None:
        """All adapters of this engine answer alike."""
        if name not in (None, BASE_MODEL, *self._named):
            raise UnknownAdapterError(f"no adapter {name!r} is loaded")

    async def generate(self, prompt_ids: TokenIds, sampling: SamplingParams) -> Completion:
        return await self.submit(prompt_ids, sampling)

    async def score(self, prompt_ids: TokenIds, *, top_logprobs: int = 0, adapter: str | None = None) -> PromptScores:
        """All tokens of a prompt are equally likely."""
        self._require_adapter(adapter)
        if self._publication is None:
            raise UnpublishedError("no weights were published to this engine yet, so it does not score")
        prompt = checked_prompt(prompt_ids, vocab_size=self.vocab_size, max_length=self.max_model_len)
        count, logprob = min(top_logprobs, self.vocab_size), -math.log(self.vocab_size)
        shape = (len(prompt) - 1, count)
        return PromptScores(
            logprobs=np.full(len(prompt) - 1, logprob, dtype=np.float32),
            tops=TopLogprobs(
                token_ids=np.broadcast_to(np.arange(count, dtype=np.int32), shape),
                logprobs=np.full(shape, logprob, dtype=np.float32),
            )
            if count
            else None,
            publication=self._publication.id,
        )

    async def load_weights(self, publication: Publication, path: Path, *, adapter: Adapter | None = None) -> None:
        await self._load(publication, lambda: read_published_weights(path, publication), adapter)

    async def load_tensors(
        self, publication: Publication, tensors: Mapping[str, TensorSource], *, adapter: Adapter | None = None
    ) -> None:
        await self._load(publication, lambda: require_published(publication, tensors), adapter)

    async def load_adapter(self, adapter: Adapter, tensors: Mapping[str, TensorSource]) -> None:
        low_rank_pairs(checked_settings(adapter.settings), tensors)
        self._named.add(adapter.name)

    async def remove_adapter(self, name: str) -> None:
        self._require_adapter(name)
        self._named.discard(name)

    async def base_digest(self) -> str:
        """This engine has no weights."""
        return "none"

    async def _load(self, publication: Publication, check: Callable[[], object], adapter: Adapter | None) -> None:
        async with self._updating:
            if not needs_loading(self._publication, publication):
                return
            started = time.time()
            if adapter is not None:
                checked_settings(adapter.settings)
            await asyncio.to_thread(check)
            # A step has no await in it, so this is always between two steps.
            self._add_drawn()
            self._publication, self._adapter = publication, adapter
            if adapter is None:
                self._named.clear()
            self._busy.updated(started, publication=publication.id, step=publication.step)

    async def adopt(self, publication: Publication) -> None:
        async with self._updating:
            require_unpublished(self._publication, publication)
            self._publication = publication

    async def weights_digest(self) -> str:
        """This engine has no weights: returns the digest of the checked publication."""
        if self._publication is None:
            raise UnpublishedError("no weights were published to this engine yet, so they have no digest")
        return self._publication.digest

    async def abort_all(self) -> int:
        num_running = self._abort_running()
        waiting = [*self._waiting]
        self._waiting.clear()
        for request in waiting:
            self._complete(request, FinishReason.ABORT)
        self._woken.set()
        return num_running + len(waiting)

    def _abort_running(self) -> int:
        self._add_drawn()
        aborted = [*self._running]
        self._running.clear()
        for running in aborted:
            self._complete(running.request, FinishReason.ABORT)
        return len(aborted)

    def _add_drawn(self) -> None:
        """Give all running requests the tokens of the steps so far."""
        if self._publication is not None:
            for running in self._running:
                running.add_drawn(next_step=self._steps, publication=self._publication.id)

    async def pause(self, mode: PauseMode) -> None:
        self._require_open()
        self._gate.pause(mode)
        if mode is PauseMode.ABORT:
            self._abort_running()
        self._drained.clear()
        self._woken.set()
        if self._gate.may_step:
            await self._drained.wait()

    async def resume(self) -> None:
        self._gate.resume()
        self._drained.set()
        self._woken.set()

    async def run(self) -> None:
        """Step while there is work.

        Takes:  requests, from `submit`.
        Gives:  completions, through their futures.
        Waits:  for requests or resume; `token_s` before each step.
        Woken:  by `submit`, `pause` and `resume`.
        Ends:   on cancellation; the remaining requests fail.
        """
        try:
            while True:
                self._forget_done()
                if not self._running:
                    self._gate.drained()
                if not self._gate.may_step:
                    self._drained.set()
                if not ((self._waiting and self._gate.may_admit) or (self._running and self._gate.may_step)):
                    self._busy.end_period()
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                started = time.time()
                await self._clock.sleep(self._config.scripted.token_s)
                self._step(started)
        finally:
            self._is_closed = True
            self._drained.set()
            self._busy.end_period()
            for request in [*(running.request for running in self._running), *self._waiting]:
                if not request.future.done():
                    request.future.set_exception(EngineClosedError("the engine was closed before the request finished"))

    def _forget_done(self) -> None:
        self._running = [running for running in self._running if not running.request.future.done()]

    def _step(self, started: float) -> None:
        """Admit, then sample one token for each running request. Does nothing if the engine was paused during the wait."""
        if self._publication is None or not self._gate.may_step:
            return
        self._forget_done()  # those that were cancelled during the wait
        self._admit()
        step, publication, num_ended = self._steps, self._publication.id, 0
        for running in [running for running in self._running if running.due_step == step]:
            request = running.request
            if request.future.done():
                continue
            try:
                reason = self._sample(running, publication)
            except GenerationError as error:
                request.future.set_exception(error)
                continue
            if reason is not None:
                self._complete(request, reason)
                num_ended += 1
            running.due_step += 1
        tokens = len(self._running)
        self._steps += 1
        self._tokens += tokens
        self._busy.step(started, time.time(), requests=num_ended, tokens=tokens, publication=publication)

    def _sample(self, running: _Running, publication: int) -> FinishReason | None:
        """Add the next token. Returns a reason if it is the last."""
        request, drawn = running.request, running.drawn
        if drawn is None:
            reason = self._sample_allowed(request, running.reply, publication)
        else:
            running.add_drawn(next_step=self._steps + 1, publication=publication)
            reason = running.reason if len(request.tokens) == len(drawn) else None
        if request.sampling.top_logprobs:
            self._add_tops(request, running.reply)
        if request.on_tokens is not None and (chunk := request.take_chunk()) is not None:
            request.on_tokens(chunk)
        return reason

    def _admit(self) -> None:
        if not self._gate.may_admit:
            return
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        count = admissible(
            (len(request.prompt) for request in self._waiting),
            free_slots=self._config.max_running - len(self._running),
            max_tokens=self._config.step_prefill_tokens or ROUND_TOKENS,
        )
        admitted = [self._waiting.popleft() for _ in range(count)]
        self._draw([running for request in admitted if (running := self._start(request)) is not None])

    def _start(self, request: GenerationRequest) -> _Running | None:
        """A script is user code: its exception, or an invalid reply, fails its own request only."""
        if request.future.done():
            return None
        try:
            reply = self._reply(request)
        except Exception as error:
            failure = GenerationError(
                f"the script failed on prompt {request.prompt.tolist()}: {type(error).__name__}: {error}"
            )
            request.future.set_exception(failure)
            return None
        running = _Running(request, reply, first_step=self._steps)
        self._running.append(running)
        return running

    def _reply(self, request: GenerationRequest) -> Reply | None:
        if self._script is None:
            return None
        prompt = request.prompt.tolist()
        reply = self._script(prompt) if callable(self._script) else self._script[tuple(prompt)]
        if not reply or not all(0 <= token < self.vocab_size for token in reply):
            raise ValueError(f"its reply {list(reply)} is empty or outside the vocabulary of {self.vocab_size}")
        return reply

    def _draw(self, started: Sequence[_Running]) -> None:
        """Draw all tokens of new requests, those of the random policy together."""
        sampled: list[_Running] = []
        for running in started:
            request, reply = running.request, running.reply
            if request.constraint is not None:
                continue
            request.start()
            if reply is not None:
                running.reason = FinishReason.STOP if len(reply) < request.limit else FinishReason.LENGTH
                running.draw(np.array(reply[: request.limit], dtype=np.int32))
                continue
            running.logprob = -math.log(self.vocab_size)
            if request.sampling.temperature == 0:
                running.draw(np.zeros(request.limit, dtype=np.int32))
            else:
                sampled.append(running)
        if sampled:
            counts = [running.request.limit for running in sampled]
            uniforms = seeded_uniforms([running.request.seed for running in sampled], counts)
            tokens = (uniforms * self.vocab_size).astype(np.int32)
            for running, end in zip(sampled, accumulate(counts), strict=True):
                running.draw(tokens[end - running.request.limit : end])

    def _sample_allowed(self, request: GenerationRequest, reply: Reply | None, publication: int) -> FinishReason | None:
        """Add a token that the grammar allows. Returns a reason if it is the last."""
        index = len(request.tokens)
        mask = request.update_mask()
        allowed = np.arange(self.vocab_size) if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if reply is None:
            uniform = seeded_uniforms([request.seed], [1], start=index)[0] if request.sampling.temperature else 0.0
            token, logprob = int(allowed[int(uniform * len(allowed))]), -math.log(len(allowed))
        elif reply[index] in allowed:
            token, logprob = reply[index], 0.0
        else:
            raise GenerationError(f"the script replies with token {reply[index]}, which the grammar excludes")
        request.accept(token)
        reason = request.append(token, logprob, publication)
        if reason is None and reply is not None and index + 1 >= len(reply):
            return FinishReason.STOP
        return reason

    def _add_tops(self, request: GenerationRequest, reply: Reply | None) -> None:
        """A script has one possible token; for the random policy all are equally likely."""
        count, token = min(request.sampling.top_logprobs, self.vocab_size), request.tokens[-1]
        ids = [token, *(other for other in range(count + 1) if other != token)][:count]
        others = -math.inf if reply is not None else -math.log(self.vocab_size)
        request.top_tokens.append(np.array(ids, dtype=np.int32))
        request.top_logprobs.append(np.array([request.logprobs[-1], *[others] * (count - 1)], dtype=np.float32))

    def _complete(self, request: GenerationRequest, reason: FinishReason) -> None:
        self._requests += 1
        if not request.future.done():
            request.future.set_result(request.completion(reason))
