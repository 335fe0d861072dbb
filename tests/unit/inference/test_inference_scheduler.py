"""A request's tokens and logprobs do not depend on how the engine schedules it.

Chunked prefill, preemption, steps launched ahead, captured steps and late stops are compared with a plain forward.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import FinishReason, SamplingParams, TokenChunk
from rollbook.inference.engine import EngineQueueFullError
from rollbook.inference.engines.embedded.build import BLOCK_SIZE
from rollbook.inference.engines.embedded.paged.batch import PagedBatch
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.engines.embedded.slot_cache import SlotCache
from rollbook.inference.pause import PauseMode
from rollbook.inference.request import BadRequestError, GenerationRequest
from tests.parts.inference.engines import (
    BYTES_PER_TOKEN,
    TinyModel,
    assert_faithful,
    embedded,
    next_step,
    some_prompts,
    until,
)
from tests.parts.inference.models import MAX_LEN, VOCAB, plain_logprobs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stepping")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_a_long_prompt_is_prefilled_in_pieces_while_others_continue(root: Path, kind: str) -> None:
    tiny = TinyModel(root=root, kind=kind)
    long, short = some_prompts(1, 200, 200)[0], [1, 2, 3]
    async with embedded(tiny, step_prefill_tokens=16, forward_tokens=16) as engine:
        running = engine.submit(short, SamplingParams(max_tokens=120))
        await until(lambda: engine.stats().tokens >= 1)
        waiting = engine.submit(long, SamplingParams(max_tokens=5))
        before = engine.stats()
        await until(lambda: engine.stats().running == 2)
        await waiting
        # There are thirteen rounds of prefill, and in each of them the running request gets a token.
        assert engine.stats().tokens - before.tokens >= 13
        completions = await asyncio.gather(running, waiting)
    assert_faithful(tiny, short, completions[0])
    assert_faithful(tiny, long, completions[1])


async def test_the_blocks_of_running_requests_keep_their_content_when_the_cache_grows(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbook.inference.engines.embedded.build.FIRST_SHARE", 0.0)
    tiny = TinyModel(root=root)
    prompts = some_prompts(8, 20, 60, seed=8)
    async with embedded(tiny, is_captured=True, steps_ahead=2) as engine:
        batch = engine.parts.scheduler.batch
        assert isinstance(batch, PagedBatch)
        before = batch.pool.capacity
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=100)) for p in prompts))
        assert batch.pool.capacity > before
        assert engine.parts.scheduler.preemptions == 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("is_captured", [False, True])
async def test_a_full_cache_preempts_the_youngest_request_and_keeps_its_tokens(root: Path, is_captured: bool) -> None:
    tiny = TinyModel(root=root)
    prompts = some_prompts(6, 3, 30)
    # Four slots of 64 or one of 256, plus the scratch slot.
    memory_mb = (MAX_LEN + 4 * 64) * BYTES_PER_TOKEN["llama"] / 1e6
    streamed: list[int] = []
    async with embedded(
        tiny, is_captured=is_captured, kv_memory_mb=memory_mb, steps_ahead=2 if is_captured else 0
    ) as engine:
        futures = [
            engine.submit(
                prompt,
                SamplingParams(max_tokens=150, seed=index),
                on_tokens=(lambda chunk: streamed.extend(chunk.token_ids.tolist())) if index == 3 else None,
            )
            for index, prompt in enumerate(prompts)
        ]
        completions = await asyncio.gather(*futures)
        assert engine.parts.scheduler.preemptions > 0
        assert engine.stats().running == engine.stats().queued == 0
    async with embedded(tiny) as large:
        alone = await asyncio.gather(
            *(
                large.generate(prompt, SamplingParams(max_tokens=150, seed=index))
                for index, prompt in enumerate(prompts)
            )
        )
    for prompt, completion, expected in zip(prompts, completions, alone, strict=True):
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        assert completion.versions.tolist() == [1] * 150
        assert_faithful(tiny, prompt, completion)
    assert streamed == completions[3].token_ids.tolist()


async def test_the_cache_never_exceeds_its_memory(root: Path) -> None:
    tiny = TinyModel(root=root)
    memory_mb = 3 * MAX_LEN * BYTES_PER_TOKEN["llama"] / 1e6
    async with embedded(tiny, kv_memory_mb=memory_mb, max_running=64) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, Runner)
        slots = runner.slots
        assert isinstance(slots, SlotCache)
        futures = [engine.submit(p, SamplingParams(max_tokens=90)) for p in some_prompts(20, 1, 120)]
        most = 0
        while not all(future.done() for future in futures):
            most = max(most, sum(t.numel() * t.element_size() for pair in slots.pairs for t in pair))
            await asyncio.sleep(0.001)
        assert 0 < most <= memory_mb * 1e6


async def test_memory_for_less_than_one_sequence_is_refused_with_advice(root: Path) -> None:
    with pytest.raises(RunError, match=r"raise inference\.kv_memory_mb or lower inference\.max_model_len"):
        async with embedded(TinyModel(root=root), kv_memory_mb=0.01):
            raise AssertionError("the engine must not open")


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("is_captured", [False, True])
async def test_steps_launched_ahead_do_not_change_the_completions(root: Path, is_captured: bool, ahead: int) -> None:
    tiny = TinyModel(root=root)
    prompts = some_prompts(30, 1, 40, seed=ahead)
    rng = random.Random(5)
    samplings = [
        SamplingParams(max_tokens=rng.choice([1, 2, 7, 40]), stop_token_ids=rng.choice([(), (3,), (4, 5)]), seed=index)
        for index in range(30)
    ]
    async with embedded(tiny, is_captured=is_captured, steps_ahead=ahead, max_running=7) as engine:
        futures = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            futures.append(engine.submit(prompt, sampling))
            if index % 6 == 5:
                # New requests arrive while others run.
                await next_step(engine)
        completions = await asyncio.gather(*futures)
        assert engine.stats().tokens == sum(len(completion.token_ids) for completion in completions)
        assert engine.stats().running == 0
    for prompt, sampling, completion in zip(prompts, samplings, completions, strict=True):
        tokens = completion.token_ids.tolist()
        hits = [index for index, token in enumerate(tokens) if token in sampling.stop_token_ids]
        if completion.finish_reason is FinishReason.STOP:
            assert hits == [len(tokens) - 1]
        else:
            assert (hits, len(tokens)) == ([], sampling.max_tokens)
        assert_faithful(tiny, prompt, completion)


async def test_an_update_in_flight_stamps_each_token_with_the_weights_of_its_step(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, steps_ahead=3) as engine:
        futures = [engine.submit([n], SamplingParams(max_tokens=200)) for n in range(5)]
        await until(lambda: engine.stats().tokens > 40)
        await engine.load_weights(*tiny.weights(2))
        completions = await asyncio.gather(*futures)
    for number, completion in enumerate(completions):
        old = int((completion.versions == 1).sum())
        assert 0 < old < 200
        assert completion.versions.tolist() == [1] * old + [2] * (200 - old)
        tokens = [number, *completion.token_ids.tolist()]
        expected = plain_logprobs(tiny.model(1), tokens[: old + 1], 1)
        np.testing.assert_allclose(completion.logprobs[:old], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
async def test_logprobs_of_truncated_distributions_equal_those_of_a_truncated_plain_forward(
    root: Path, kind: str
) -> None:
    tiny = TinyModel(root=root, kind=kind)
    sampling = SamplingParams(max_tokens=25, temperature=0.8, top_k=9, top_p=0.8)
    prompts = some_prompts(8, 2, 20)
    async with embedded(tiny, is_captured=kind == "llama") as engine:
        # Rows without truncation run in the same batch.
        not_truncated = [engine.submit([n], SamplingParams(max_tokens=25)) for n in range(4)]
        completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
        whole = await asyncio.gather(*not_truncated)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.token_ids.tolist()]
        with torch.inference_mode():
            logits = tiny.model(1)(input_ids=torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].float() / 0.8
        for step, (line, token) in enumerate(zip(logits, completion.token_ids.tolist(), strict=True)):
            ordered, order = line.sort(descending=True)
            ordered[9:] = -torch.inf
            probabilities = ordered.softmax(-1)
            ordered[probabilities.cumsum(-1) - probabilities >= 0.8] = -torch.inf
            expected = float(ordered.log_softmax(-1)[(order == token).nonzero()[0, 0]])
            assert completion.logprobs[step] == pytest.approx(expected, abs=1e-3)
    for number, completion in enumerate(whole):
        assert_faithful(tiny, [number], completion)


async def test_a_thousand_requests_wait_and_one_more_is_refused_with_retry_advice(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, max_running=64, max_queued=1000) as engine:
        await engine.pause(PauseMode.KEEP)
        futures = [engine.submit([n % VOCAB], SamplingParams(max_tokens=2)) for n in range(1000)]
        with pytest.raises(EngineQueueFullError) as refused:
            engine.submit([1], SamplingParams())
        assert refused.value.retry_after_s
        for future in futures[1::2]:
            future.cancel()
        await engine.resume()
        done = await asyncio.gather(*futures[::2])
        assert [len(completion.token_ids) for completion in done] == [2] * 500
        assert engine.stats().queued == engine.stats().running == 0


async def test_siblings_cancelled_during_their_prefill_do_not_affect_the_others(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 150, 150)[0]
    async with embedded(tiny, step_prefill_tokens=8, forward_tokens=8) as engine:
        siblings = [engine.submit(prompt, SamplingParams(max_tokens=4, seed=n)) for n in range(3)]
        await until(lambda: engine.stats().running == 3)
        siblings[0].cancel()
        completions = await asyncio.gather(*siblings[1:])
    for completion in completions:
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("is_captured", [False, True])
async def test_recomputing_after_an_update_includes_prompts_in_prefill(root: Path, is_captured: bool) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 180, 180)[0]
    async with embedded(
        tiny, is_captured=is_captured, step_prefill_tokens=8, forward_tokens=8, kv_after_update="recompute"
    ) as engine:
        running = engine.submit([1], SamplingParams(max_tokens=100))
        await until(lambda: engine.stats().tokens >= 1)
        in_prefill = engine.submit(prompt, SamplingParams(max_tokens=6))
        await until(lambda: engine.stats().running == 2)
        await engine.load_weights(*tiny.weights(2))
        completion = await in_prefill
        await running
    new = completion.versions == 2
    assert new.any()
    tokens = [*prompt, *completion.token_ids.tolist()]
    expected = np.array(plain_logprobs(tiny.model(2), tokens, len(prompt)))
    np.testing.assert_allclose(completion.logprobs[new], expected[new], atol=1e-4)


async def test_the_engine_reports_its_choices_and_their_reasons(root: Path) -> None:
    async with embedded(TinyModel(root=root, kind="gpt2"), exactness="fast") as engine:
        assert engine.exactness.inexact_because == "inference.exactness is fast"
        assert "because it is not built like a Llama" in engine.parts.choices[0]
    async with embedded(TinyModel(root=root), forward="module") as engine:
        assert "because the config requires it" in engine.parts.choices[0]
        completion = await engine.generate([1, 2], SamplingParams(max_tokens=10))
    assert_faithful(TinyModel(root=root), [1, 2], completion)


async def test_a_request_cancelled_while_waiting_frees_its_place_in_the_queue(root: Path) -> None:
    async with embedded(TinyModel(root=root), max_queued=3) as engine:
        await engine.pause(PauseMode.KEEP)
        cancelled = [engine.submit([1], SamplingParams(max_tokens=1)) for _ in range(3)]
        for future in cancelled:
            future.cancel()
        await until(lambda: engine.stats().queued == 0)
        waiting = engine.submit([1], SamplingParams(max_tokens=1))
        await engine.resume()
        assert len((await waiting).token_ids) == 1


async def test_tokens_launched_after_a_stop_token_are_not_counted_when_the_limit_was_reached(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, steps_ahead=3) as engine:
        futures = [
            engine.submit([n % VOCAB], SamplingParams(max_tokens=4, stop_token_ids=tuple(range(8)), seed=n))
            for n in range(40)
        ]
        completions = await asyncio.gather(*futures)
        assert {completion.finish_reason for completion in completions} == {FinishReason.STOP, FinishReason.LENGTH}
        assert engine.stats().tokens == sum(len(completion.token_ids) for completion in completions)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_a_pause_ends_preempted_requests_as_it_ends_running_ones(
    root: Path, mode: PauseMode, is_captured: bool
) -> None:
    tiny = TinyModel(root=root)
    memory_mb = (MAX_LEN + 4 * 64) * BYTES_PER_TOKEN["llama"] / 1e6
    async with embedded(tiny, is_captured=is_captured, kv_memory_mb=memory_mb) as engine:
        futures = [engine.submit([n], SamplingParams(max_tokens=200)) for n in range(4)]
        await until(lambda: engine.stats().running == 4)
        if mode is PauseMode.ABORT:
            await until(lambda: engine.parts.scheduler.preemptions > 0)
        await engine.pause(mode)
        assert engine.parts.scheduler.preemptions > 0
        assert engine.stats().queued == engine.stats().running == 0
        completions = await asyncio.gather(*futures)
    reasons = {completion.finish_reason for completion in completions}
    assert FinishReason.ABORT in reasons if mode is PauseMode.ABORT else reasons == {FinishReason.LENGTH}
    for number, completion in enumerate(completions):
        assert (len(completion.token_ids) == 200) is (completion.finish_reason is FinishReason.LENGTH)
        assert_faithful(tiny, [number], completion)


async def test_a_cache_below_its_limit_grows_instead_of_waiting_for_pinned_prefixes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbook.inference.engines.embedded.build.FIRST_SHARE", 0.0)
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, prefix_pin_s=600.0) as engine:
        batch = engine.parts.scheduler.batch
        assert isinstance(batch, PagedBatch)
        for prompt in some_prompts(2, 110, 110, seed=4):
            await engine.generate(prompt, SamplingParams(max_tokens=1))
        pinned = batch.pool.num_cached
        running = engine.submit([1], SamplingParams(max_tokens=250))
        await until(lambda: engine.stats().tokens > 2)
        await engine.generate(some_prompts(1, 60, 60, seed=5)[0], SamplingParams(max_tokens=1))
        assert not running.done()
        assert batch.pool.num_cached == pinned + 60 // BLOCK_SIZE
        running.cancel()


async def test_the_next_turn_of_a_pinned_conversation_does_not_wait_for_its_own_blocks(root: Path) -> None:
    tiny = TinyModel(root=root)
    memory_mb = 32 * BLOCK_SIZE * BYTES_PER_TOKEN["llama"] / 1e6
    first = some_prompts(1, 160, 160, seed=4)[0]
    async with embedded(
        tiny, is_captured=True, prefix_pin_s=600.0, prefix_cache_share=0.9, kv_memory_mb=memory_mb
    ) as engine:
        await engine.generate(first, SamplingParams(max_tokens=1))
        running = engine.submit(some_prompts(1, 200, 200, seed=5)[0], SamplingParams(max_tokens=50))
        await next_step(engine)
        await next_step(engine)
        completion = await engine.generate([*first, 1, 2, 3], SamplingParams(max_tokens=2))
        assert not running.done()
        assert completion.cached_tokens == 160 // BLOCK_SIZE * BLOCK_SIZE
        await running


async def test_prompts_of_another_dtype_share_only_equal_prefixes(root: Path) -> None:
    tiny = TinyModel(root=root)
    first, second = some_prompts(2, 96, 96, seed=6)
    second[:40] = first[:40]
    async with embedded(tiny, is_captured=True) as engine:
        await engine.generate(np.array(first, dtype=np.int64), SamplingParams(max_tokens=1))
        completion = await engine.generate(np.array(second, dtype=np.int64), SamplingParams(max_tokens=9))
        assert completion.cached_tokens == 40 // BLOCK_SIZE * BLOCK_SIZE
        with pytest.raises(BadRequestError, match="outside the vocabulary"):
            engine.submit(np.array([2**33 + 1]), SamplingParams())
    assert_faithful(tiny, second, completion)


async def test_all_row_counts_are_captured_before_the_first_request(root: Path) -> None:
    async with embedded(TinyModel(root=root), is_captured=True, max_running=3) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, PackedRunner)
        captures = runner.captures
        await asyncio.gather(*(engine.generate([n], SamplingParams(max_tokens=9)) for n in range(3)))
        assert runner.captures == captures


@pytest.mark.parametrize("draft_tokens", [0, 5])
async def test_steps_of_split_rows_are_captured_before_the_first_request(
    root: Path, monkeypatch: pytest.MonkeyPatch, draft_tokens: int
) -> None:
    monkeypatch.setattr("rollbook.inference.engines.embedded.paged.runner.CHUNK", 8)
    monkeypatch.setattr("rollbook.inference.engines.embedded.paged.step_input.PROGRAMS_WANTED", 1)
    settings = {"max_running": 3, "forward_tokens": 128, "draft_tokens": draft_tokens}
    async with embedded(TinyModel(root=root), is_captured=True, **settings) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, PackedRunner)
        # With exact sums the length of chunks is fixed, so long rows have more parts.
        runner.model.is_exact = True
        runner.forget_graphs()
        await engine.warm_up()
        captures = runner.captures
        prompts = some_prompts(6, 2, 100, seed=9)
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=100)) for p in prompts))
        assert runner.captures == captures
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(TinyModel(root=root), prompt, completion)


async def test_a_request_with_many_stop_tokens_does_not_slow_down_later_ones(root: Path) -> None:
    async with embedded(TinyModel(root=root), is_captured=True) as engine:
        many = await engine.generate([1], SamplingParams(max_tokens=20, stop_token_ids=tuple(range(8, 1000))))
        assert many.finish_reason is FinishReason.STOP
        sampling = SamplingParams(max_tokens=100, stop_token_ids=(3, 4))
        completions = await asyncio.gather(*(engine.generate([n], sampling) for n in range(5)))
        assert engine.parts.scheduler.table.stops.shape[1] == 2
    assert all(completion.token_ids[-1] in (3, 4) for completion in completions)


async def test_a_preempted_request_does_not_report_its_own_prompt_as_cached(root: Path) -> None:
    memory_mb = (MAX_LEN + 3 * BLOCK_SIZE) * BYTES_PER_TOKEN["llama"] / 1e6
    async with embedded(
        TinyModel(root=root), is_captured=True, kv_memory_mb=memory_mb, prefix_cache_share=0.9
    ) as engine:
        # The second is preempted shortly before the first ends, so most of its blocks are still cached.
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(max_tokens=limit))
                for prompt, limit in zip(some_prompts(2, 64, 64, seed=7), (90, 120), strict=True)
            )
        )
        assert engine.parts.scheduler.preemptions > 0
        assert [completion.cached_tokens for completion in completions] == [0, 0]
        assert engine.stats().cached_tokens == 0


async def test_a_preempted_request_is_no_longer_followed_for_its_stream(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[TokenChunk] = []
    async with embedded(TinyModel(root=root), is_captured=True) as engine:
        scheduler = engine.parts.scheduler
        to_preempt, followed = scheduler.batch.to_preempt, list[int]()

        def preempt() -> list[GenerationRequest]:
            followed.append(len(scheduler._streaming))
            running = [request for request in scheduler.table.requests() if request.tokens]
            return running if scheduler.preemptions < 3 else to_preempt()

        monkeypatch.setattr(scheduler.batch, "to_preempt", preempt)
        done = await engine.submit([1, 2, 3], SamplingParams(max_tokens=30), on_tokens=chunks.append)
        assert scheduler.preemptions == 3
    assert max(followed) == 1
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids.tolist()


async def test_a_prompt_whose_prefill_starts_again_is_counted_once_as_cached(root: Path) -> None:
    tiny = TinyModel(root=root)
    shared, rest = some_prompts(2, 64, 64, seed=8)
    async with embedded(
        tiny,
        is_captured=True,
        # Many steps: the update must arrive before the prefill ends.
        step_prefill_tokens=1,
        forward_tokens=16,
        kv_after_update="recompute",
    ) as engine:
        first = engine.submit(shared, SamplingParams(max_tokens=60))
        await until(lambda: engine.stats().tokens >= 1)
        second = engine.submit([*shared, *rest], SamplingParams(max_tokens=2))
        await until(lambda: engine.stats().cached_tokens > 0)
        await engine.load_weights(*tiny.weights(2))
        completion = await second
        assert completion.versions.tolist() == [2, 2]
        assert engine.stats().cached_tokens == completion.cached_tokens == 64
        await first
