"""Samples a few answers in several ways, before an engine serves requests, so that their logprobs can be compared with those of a
trainer.

The same bits are promised whatever the batch, the pieces of prefill and the reuse of prefixes, so the ways differ in these: prompts
are sampled one at a time, in one batch with others that come and go, and as the next turns of answers whose keys are in the cache.
"""

# M rows, E width

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from rollbook.contracts.policy import SamplingParams
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.scheduler import RoundResults, Scheduler
from rollbook.inference.request import GenerationRequest, token_array
from rollbook.numerics.machine import ProbedAnswer
from rollbook.numerics.operations import CHUNK

PROMPT_LENGTHS = (5, 40, 130, CHUNK - 6)
"""The keys of the last one are joined from several parts as soon as it is answered."""
ANSWER_TOKENS, TURN_TOKENS = 12, 9
OTHERS, OTHER_TOKENS = 24, 40
"""Requests of the batch that are not compared: their prompts are prefilled in between, and they end at different times."""
ROW_COUNTS = (1, 2, 7, 16, 33, 64, 100, 128, 200)
ALL_ROWS = 256

ALONE, TOGETHER, CACHED = "one at a time", "in a batch", "after a cached turn"


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: list[int]
    sampling: SamplingParams


def probe(scheduler: Scheduler, *, vocab_size: int, max_model_len: int) -> list[ProbedAnswer]:
    """The engine has no requests. Afterwards the cache shares nothing of the probe."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    longest = max_model_len - 2 * ANSWER_TOKENS - TURN_TOKENS
    lengths = sorted({min(length, longest) for length in PROMPT_LENGTHS if longest > 0})
    questions = [
        _Question(tokens(length), _sampling(seed, temperature=0.7 if seed % 2 else 1.0))
        for seed, length in enumerate(lengths)
    ]
    others = [
        _Question(tokens(draw.randint(1, min(OTHER_TOKENS, longest))), _sampling(seed, draw.randint(1, ANSWER_TOKENS)))
        for seed in range(OTHERS if lengths else 0)
    ]
    answers: list[ProbedAnswer] = []
    try:
        for question in questions:
            answers += _sampled(ALONE, scheduler, [[question]])
        turns = [
            _Question([*answer.prompt.tolist(), *answer.tokens.tolist(), *tokens(TURN_TOKENS)], question.sampling)
            for question, answer in zip(questions, answers, strict=True)
        ]
        answers += _sampled(CACHED, scheduler, [turns])
        scheduler.weights_changed()
        half = len(others) // 2
        together = _sampled(TOGETHER, scheduler, [[*others[:half], *questions[:2]], [*questions[2:], *others[half:]]])
        answers += [answer for answer in together if len(answer.tokens) == ANSWER_TOKENS]
    finally:
        scheduler.clear()
        scheduler.weights_changed()
    return answers


def _sampling(seed: int, max_tokens: int = ANSWER_TOKENS, *, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)


def _sampled(how: str, scheduler: Scheduler, waves: Sequence[Sequence[_Question]]) -> list[ProbedAnswer]:
    """The requests of a wave join two rounds after those before."""
    # Nothing waits for the results: they are read from the requests.
    loop = asyncio.new_event_loop()
    try:
        future = loop.create_future()
        requests = [_request(question, future, at) for at, question in enumerate(chain.from_iterable(waves))]
        waiting: deque[GenerationRequest] = deque()
        coming, results, rounds = deque(requests), RoundResults(), 0
        sizes = deque(map(len, waves))
        while coming or waiting or scheduler.num_running or scheduler.has_launched:
            if sizes and rounds % 2 == 0:
                waiting.extend(coming.popleft() for _ in range(sizes.popleft()))
            rounds += 1
            number = scheduler.num_admissible(waiting)
            scheduler.join([waiting.popleft() for _ in range(number)])
            if scheduler.num_running:
                scheduler.round(0, results)
            else:
                scheduler.drain(results)
            waiting.extendleft(reversed(scheduler.take_preempted()))
    finally:
        loop.close()
    for _, error in results.failed:
        raise error
    return [
        ProbedAnswer(
            how=how,
            prompt=request.prompt,
            tokens=completion.token_ids,
            logprobs=completion.logprobs,
            temperature=request.sampling.temperature,
        )
        for request, reason in sorted(results.done, key=lambda done: done[0].order)
        for completion in (request.completion(reason),)
    ]


def _request(question: _Question, future: "asyncio.Future[object]", order: int) -> GenerationRequest:
    request = GenerationRequest(
        token_array(question.prompt),
        question.sampling,
        limit=question.sampling.max_tokens,
        future=future,  # type: ignore[arg-type]  # it gets no result
    )
    request.order = order
    return request


@torch.inference_mode()
def batch_dependent(model: LlamaForward) -> list[str]:
    """The operations of a layer, by name, whose rows get other bits in a batch of another size, each with a number of rows."""
    found = []
    for name, width, operation in model.row_operations():
        drawn = torch.Generator().manual_seed(0)
        rows_ME = torch.randn(ALL_ROWS, width, generator=drawn).to(model.device, model.dtype)
        expected = operation(rows_ME.clone())
        counts = [n for n in ROW_COUNTS if not torch.equal(operation(rows_ME[:n].clone()), expected[:n])]
        if counts:
            found.append(f"{name} with {', '.join(map(str, counts))} rows")
    return found
