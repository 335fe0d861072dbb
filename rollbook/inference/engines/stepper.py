"""One step of the embedded engine: prefill those who join, decode those who run, and say who is done.

Owned by the engine's thread. It knows requests, model and cache; it knows nothing of threads, queues or futures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollbook.contracts.policy import FinishReason
from rollbook.inference.batching import compaction, prefill_forwards
from rollbook.inference.engine import GenerationError
from rollbook.inference.engines.causal_lm import CausalLM
from rollbook.inference.engines.prompt_memo import PromptMemo
from rollbook.inference.engines.sampling import sample
from rollbook.inference.engines.slot_cache import SlotCache
from rollbook.inference.request import Request, seeded_uniform


@dataclass(slots=True)
class Finished:
    """What a step ended."""

    done: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    tokens: int = 0


class Stepper:
    """Row i of the cache belongs to `running[i]`."""

    def __init__(self, model: CausalLM, *, max_running: int, forward_tokens: int, memo_bytes: int, seed: int) -> None:
        self._model = model
        self._max_running = max_running
        self._forward_tokens = forward_tokens
        self._rng = np.random.default_rng(seed)
        self._memo = PromptMemo(memo_bytes // (4 * model.vocab_size))
        self._slots = self._fresh_slots()
        self.running: list[Request] = []
        self.forwards = 0

    def step(self, joining: Sequence[Request], publication: int) -> Finished:
        """Everything sampled here comes from the weights of `publication`."""
        finished = Finished()
        with torch.inference_mode():
            if joining:
                self._prefill(joining, publication, finished)
            if self.running:
                self._decode(publication, finished)
        return finished

    def drop_cancelled(self) -> int:
        """Free the slots of requests nobody waits for any more."""
        kept = [not request.answer.done() for request in self.running]
        self._keep(kept)
        return len(kept) - len(self.running)

    def clear(self) -> list[Request]:
        """Give up all running requests and their cache."""
        running, self.running = self.running, []
        self._slots = self._fresh_slots()
        return running

    def weights_changed(self) -> None:
        self._memo.clear()

    def recompute(self) -> None:
        """Fill the cache of every running row again, under the current weights."""
        # All tokens but the last: its keys are written by the decode that consumes it.
        rows = [[*request.prompt, *request.tokens[:-1]] for request in self.running]
        with torch.inference_mode():
            for forward in prefill_forwards([len(row) for row in rows], max_tokens=self._forward_tokens):
                _, cache = self._model.prefill([rows[index] for index in forward])
                self._slots.store(cache, range(len(forward)), forward)
                self.forwards += 1

    def _prefill(self, joining: Sequence[Request], publication: int, finished: Finished) -> None:
        singles = [request for request in joining if request.limit == 1]
        if singles:
            known = [(request, self._memo.get(request.prompt)) for request in singles]
            hits = [(request, logits_V) for request, logits_V in known if logits_V is not None]
            if hits:
                self._advance([r for r, _ in hits], torch.stack([x for _, x in hits]), publication, finished)
            missed = {id(request) for request, logits_V in known if logits_V is None}
            joining = [request for request in joining if request.limit > 1 or id(request) in missed]
        # Siblings of a group bring the same prompt: it is computed once.
        by_prompt: dict[tuple[int, ...], list[Request]] = {}
        for request in joining:
            by_prompt.setdefault(tuple(request.prompt), []).append(request)
        prompts = list(by_prompt)
        for forward in prefill_forwards([len(p) for p in prompts], max_tokens=self._forward_tokens):
            batch = [prompts[index] for index in forward]
            logits_NV, cache = self._model.prefill(batch)
            self.forwards += 1
            self._remember(batch, by_prompt, logits_NV)
            sources = [row for row, prompt in enumerate(batch) for _ in by_prompt[prompt]]
            askers = [request for prompt in batch for request in by_prompt[prompt]]
            if len(askers) > len(batch):
                logits_NV = logits_NV[torch.tensor(sources, device=logits_NV.device)]
            goes_on = self._advance(askers, logits_NV, publication, finished)
            joined = [index for index, stays in enumerate(goes_on) if stays]
            if joined:
                first = len(self.running)
                self._slots.store(cache, [sources[index] for index in joined], range(first, first + len(joined)))
                self.running.extend(askers[index] for index in joined)

    def _remember(
        self,
        batch: Sequence[tuple[int, ...]],
        by_prompt: Mapping[tuple[int, ...], Sequence[Request]],
        logits_NV: Tensor,
    ) -> None:
        for row, prompt in enumerate(batch):
            if any(request.limit == 1 for request in by_prompt[prompt]):
                self._memo.put(prompt, logits_NV[row])

    def _decode(self, publication: int, finished: Finished) -> None:
        tokens = [request.tokens[-1] for request in self.running]
        positions = [len(request.prompt) + len(request.tokens) - 1 for request in self.running]
        logits_NV = self._model.decode(tokens, positions, self._slots)
        self.forwards += 1
        failed_before = len(finished.failed)
        kept = self._advance(self.running, logits_NV, publication, finished)
        if len(finished.failed) > failed_before:
            # What is not a number must not linger in a slot: even a masked position would spoil the next tenant.
            broken = {id(request) for request, _ in finished.failed}
            self._slots.wipe([row for row, request in enumerate(self.running) if id(request) in broken])
        self._keep(kept)

    def _advance(
        self, requests: Sequence[Request], logits_NV: Tensor, publication: int, finished: Finished
    ) -> list[bool]:
        """Sample one token for each request. Tells which of them go on."""
        tokens, logprobs = sample(logits_NV, [request.sampling for request in requests], self._uniforms(requests))
        goes_on: list[bool] = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if math.isnan(logprob):
                finished.failed.append((request, _not_a_number(request, publication)))
                goes_on.append(False)
                continue
            finished.tokens += 1
            reason = request.take(token, logprob, publication)
            goes_on.append(reason is None)
            if reason is not None:
                finished.done.append((request, reason))
        return goes_on

    def _uniforms(self, requests: Sequence[Request]) -> list[float]:
        uniforms: list[float] = self._rng.random(len(requests)).tolist()
        for row, request in enumerate(requests):
            if request.sampling.seed is not None:
                uniforms[row] = seeded_uniform(request.sampling.seed, len(request.tokens))
        return uniforms

    def _keep(self, kept: Sequence[bool]) -> None:
        """Let rows go and close the gaps."""
        if all(kept):
            return
        moves = compaction(kept)
        if moves:
            lengths = [len(self.running[source].prompt) + len(self.running[source].tokens) for source, _ in moves]
            self._slots.move(moves, length=max(lengths))
            for source, target in moves:
                self.running[target] = self.running[source]
        del self.running[sum(kept) :]

    def _fresh_slots(self) -> SlotCache:
        return SlotCache(self._model.num_layers, max_rows=self._max_running, max_length=self._model.max_model_len)


def _not_a_number(request: Request, publication: int) -> GenerationError:
    position = len(request.prompt) + len(request.tokens)
    return GenerationError(
        f"publication {publication} gave logits that are not numbers at position {position}; this request was given up, "
        "others go on. The weights have probably diverged"
    )
