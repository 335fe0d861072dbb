"""Reuse of a cached prefix does not change tokens or logprobs."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.engines.embedded.build import BLOCK_SIZE
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.prefix_cache import PrefixCache
from rollbook.inference.engines.embedded.slot_batch import SlotBatch
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache
from rollbook.inference.pause import PauseMode
from tests.parts.inference.engines import BYTES_PER_TOKEN, TinyModel, assert_faithful, embedded, some_prompts, until
from tests.parts.inference.models import MAX_LEN, VOCAB, plain_logprobs

STOPS = (3, 4, 5, 6, 7)
CAPTURED: dict[str, Any] = {"is_captured": True, "steps_ahead": 2}
IN_PIECES: dict[str, Any] = {"step_prefill_tokens": 16, "forward_tokens": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


async def turns(
    engine: TransformersEngine, prompt: list[int], *, count: int, seed: int, stop: tuple[int, ...] = ()
) -> list[tuple[list[int], Completion]]:
    """An episode: each prompt is the conversation so far, and a few more tokens."""
    rng = random.Random(seed)
    played = []
    for turn in range(count):
        completion = await engine.generate(prompt, SamplingParams(max_tokens=9, seed=seed + turn, stop_token_ids=stop))
        played.append((prompt, completion))
        prompt = [*prompt, *completion.token_ids.tolist(), *(rng.randrange(VOCAB) for _ in range(5))]
    return played


async def mixed_completion(engine: TransformersEngine, tiny: TinyModel, prompt: list[int], number: int) -> Completion:
    """A completion during which the weights of `number` were loaded."""
    sampled = engine.stats().tokens
    running = engine.submit(prompt, SamplingParams(max_tokens=150))
    await until(lambda: engine.stats().tokens > sampled)
    await engine.pause(PauseMode.KEEP)
    await engine.load_weights(*tiny.weights(number))
    await engine.resume()
    mixed = await running
    assert set(mixed.versions.tolist()) == {number - 1, number}
    return mixed


@pytest.mark.parametrize(
    ("kind", "stop", "options"),
    [
        ("llama", (), {}),
        ("llama", STOPS, {}),
        ("llama", (), CAPTURED),
        ("llama", STOPS, CAPTURED),
        ("llama", STOPS, IN_PIECES),
        ("gpt2", STOPS, IN_PIECES),
    ],
)
async def test_turns_that_continue_each_other_give_the_same_tokens_and_logprobs(
    root: Path, kind: str, stop: tuple[int, ...], options: dict[str, Any]
) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = some_prompts(4, 20, 40, seed=1)
    played = {}
    for share in (0.25, 0.0):
        async with embedded(tiny, prefix_cache_share=share, prefix_cache_least=16, **options) as engine:
            played[share] = await asyncio.gather(
                *(turns(engine, prompt, count=3, seed=number, stop=stop) for number, prompt in enumerate(prompts))
            )
            assert (engine.stats().cached_tokens > 0) is (share > 0)
    for reused, plain in zip(played[0.25], played[0.0], strict=True):
        for (prompt, ours), (_, theirs) in zip(reused, plain, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert_faithful(tiny, prompt, ours)
        # The previous turn without its last token, whose keys were never written. Blocks are shared when they are full.
        whole = BLOCK_SIZE if options is CAPTURED else 1
        known = [len(before) + len(completion.token_ids) - 1 for before, completion in reused[:-1]]
        expected = [0, *(length // whole * whole for length in known)]
        assert [completion.cached_tokens for _, completion in reused] == expected
        assert all(completion.cached_tokens == 0 for _, completion in plain)


async def test_new_weights_clear_the_cache_and_a_request_of_two_versions_is_not_cached(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 40, 40)[0]
    async with embedded(tiny, prefix_cache_least=16) as engine:
        first = await engine.generate(prompt, SamplingParams(max_tokens=4, seed=1))
        await engine.load_weights(*tiny.weights(2))
        longer = [*prompt, *first.token_ids.tolist(), 1]
        assert (await engine.generate(longer, SamplingParams(max_tokens=2))).cached_tokens == 0
        mixed = await mixed_completion(engine, tiny, prompt, 3)
        after = [*prompt, *mixed.token_ids.tolist(), 1]
        completion = await engine.generate(after, SamplingParams(max_tokens=3))
        # Its keys are of two versions: with them, the stamps of the next turn would be wrong.
        assert completion.cached_tokens == 0
        expected = plain_logprobs(tiny.model(3), [*after, *completion.token_ids.tolist()], len(after))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_the_logits_of_a_prompt_of_two_versions_are_not_reused(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 200, 200)[0]
    async with embedded(tiny, step_prefill_tokens=1, prefix_cache_share=0.0) as engine:
        mixed = engine.submit(prompt, SamplingParams(max_tokens=1))
        await until(lambda: engine.stats().forwards > 2)
        await engine.pause(PauseMode.KEEP)
        assert not mixed.done()
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        await mixed
        completion = await engine.generate(prompt, SamplingParams(max_tokens=1))
        expected = plain_logprobs(tiny.model(2), [*prompt, *completion.token_ids.tolist()], len(prompt))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_recomputed_requests_are_cached(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 40, 40)[0]
    async with embedded(tiny, prefix_cache_least=16, kv_after_update="recompute") as engine:
        mixed = await mixed_completion(engine, tiny, prompt, 2)
        after = [*prompt, *mixed.token_ids.tolist(), 1]
        completion = await engine.generate(after, SamplingParams(max_tokens=3))
        assert completion.cached_tokens == len(after) - 2
        expected = plain_logprobs(tiny.model(2), [*after, *completion.token_ids.tolist()], len(after))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_siblings_share_a_prefix_and_a_full_cache_still_preempts(root: Path) -> None:
    tiny = TinyModel(root=root)
    memory_mb = (2 * MAX_LEN + 6 * 64) * BYTES_PER_TOKEN["llama"] / 1e6
    system = some_prompts(1, 40, 40, seed=4)[0]
    async with embedded(tiny, prefix_cache_least=16, kv_memory_mb=memory_mb, max_running=16) as engine:
        await engine.generate(system, SamplingParams(max_tokens=2))
        prompts = [[*system, *tail] for tail in some_prompts(4, 3, 6, seed=5)]
        requested = [prompt for prompt in prompts for _ in range(3)]
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=100)) for p in requested))
        one = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=1)) for p in requested))
        assert engine.parts.scheduler.preemptions > 0
        batch = engine.parts.scheduler.batch
        assert isinstance(batch, SlotBatch)
        assert batch.prefixes.num_tokens <= MAX_LEN + 6 * 64
    for prompt, completion in zip([*requested, *requested], [*completions, *one], strict=True):
        assert_faithful(tiny, prompt, completion)
    assert sum(completion.cached_tokens >= len(system) for completion in completions) >= 3


@settings(max_examples=60)
@given(st.data())
def test_the_cache_returns_exactly_what_was_added_and_stays_within_its_limit(data: st.DataObject) -> None:
    """The keys of a row are its tokens, so that they can be compared."""
    slots = SlotCache([LayerShape(1, 1, 1)], dtype=torch.float32, device=torch.device("cpu"))
    slots.resize(2, 128)
    cache = PrefixCache(slots, max_tokens=200, min_length=8)
    words = st.lists(st.integers(0, 1), min_size=9, max_size=90)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(words)
        if data.draw(st.booleans()):
            slots.pairs[0][0][0, 0, : len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)
            cached_kv = cache.copy_out(0, len(tokens), weights_generation=cache.weights_generation)
            if cached_kv is not None:
                cache.add(tokens, cached_kv, weights_generation=cache.weights_generation)
            assert cache.num_tokens <= 200
        elif (hit := cache.find(tokens)) is not None:
            assert 8 <= hit.length < len(tokens)
            slots.zero_rows([1])
            cache.copy_in(hit, 1)
            found = slots.pairs[0][0][1, 0, : hit.length, 0].to(torch.int64).tolist()
            assert found == tokens[: hit.length]
    cache.weights_changed()
    assert (len(cache), cache.num_tokens, cache.find([0] * 90)) == (0, 0, None)
