"""What an earlier request computed is taken over by the prompt that goes on from it, and nothing can be told apart afterwards."""

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
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.prefix_cache import PrefixCache
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache
from tests.parts.inference.engines import TinyModel, until
from tests.parts.inference.models import MAX_LEN, VOCAB, plain_logprobs
from tests.unit.inference.test_inference_stepping import BYTES_A_TOKEN, assert_faithful, embedded, some_prompts

STOPS = (3, 4, 5, 6, 7)
CAPTURED: dict[str, Any] = {"is_captured": True, "steps_ahead": 2}
IN_PIECES: dict[str, Any] = {"step_prefill_tokens": 16, "forward_tokens": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


async def turns(
    engine: TransformersEngine, prompt: list[int], *, count: int, seed: int, stop: tuple[int, ...] = ()
) -> list[tuple[list[int], Completion]]:
    """An episode: each prompt is all that was said before, and a few tokens more."""
    rng = random.Random(seed)
    told = []
    for turn in range(count):
        completion = await engine.generate(prompt, SamplingParams(max_tokens=9, seed=seed + turn, stop_token_ids=stop))
        told.append((prompt, completion))
        prompt = [*prompt, *completion.token_ids.tolist(), *(rng.randrange(VOCAB) for _ in range(5))]
    return told


async def mixed_completion(
    engine: TransformersEngine, tiny: TinyModel, prompt: list[int], numbers: range
) -> tuple[Completion, int]:
    """One that new weights met while it ran, and their number."""
    for number in numbers:
        running = engine.submit(prompt, SamplingParams(max_tokens=150))
        await until(lambda: engine.stats().running > 0)
        await engine.load_weights(*tiny.weights(number))
        mixed = await running
        if set(mixed.versions.tolist()) == {number - 1, number}:
            return mixed, number
    raise AssertionError("no update ever arrived while a request was running")


@pytest.mark.parametrize(
    ("kind", "stop", "way"),
    [
        ("llama", (), {}),
        ("llama", STOPS, {}),
        ("llama", (), CAPTURED),
        ("llama", STOPS, CAPTURED),
        ("llama", STOPS, IN_PIECES),
        ("gpt2", STOPS, IN_PIECES),
    ],
)
async def test_turns_that_go_on_from_each_other_give_the_same_tokens_and_logprobs(
    root: Path, kind: str, stop: tuple[int, ...], way: dict[str, Any]
) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = some_prompts(4, 20, 40, seed=1)
    played = {}
    for share in (0.25, 0.0):
        async with embedded(tiny, prefix_cache_share=share, prefix_cache_least=16, **way) as engine:
            played[share] = await asyncio.gather(
                *(turns(engine, prompt, count=3, seed=number, stop=stop) for number, prompt in enumerate(prompts))
            )
            assert (engine.stats().cached_tokens > 0) is (share > 0)
    for kept, plain in zip(played[0.25], played[0.0], strict=True):
        for (prompt, ours), (_, theirs) in zip(kept, plain, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert_faithful(tiny, prompt, ours)
        # All of the turn before but its last token, whose keys were never written.
        expected = [0] + [len(before) + len(said.token_ids) - 1 for before, said in kept[:-1]]
        assert [said.cached_tokens for _, said in kept] == expected
        assert all(said.cached_tokens == 0 for _, said in plain)


async def test_new_weights_empty_the_cache_and_a_request_that_saw_both_is_not_kept(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 40, 40)[0]
    async with embedded(tiny, prefix_cache_least=16) as engine:
        first = await engine.generate(prompt, SamplingParams(max_tokens=4, seed=1))
        await engine.load_weights(*tiny.weights(2))
        longer = [*prompt, *first.token_ids.tolist(), 1]
        assert (await engine.generate(longer, SamplingParams(max_tokens=2))).cached_tokens == 0
        mixed, number = await mixed_completion(engine, tiny, prompt, range(3, 15))
        after = [*prompt, *mixed.token_ids.tolist(), 1]
        completion = await engine.generate(after, SamplingParams(max_tokens=3))
        # Its keys are of two versions: taking them over would make the next turn's stamp untrue.
        assert completion.cached_tokens == 0
        expected = plain_logprobs(tiny.model(number), [*after, *completion.token_ids.tolist()], len(after))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_where_running_requests_are_recomputed_they_may_be_kept(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = some_prompts(1, 40, 40)[0]
    async with embedded(tiny, prefix_cache_least=16, kv_after_update="recompute") as engine:
        mixed, number = await mixed_completion(engine, tiny, prompt, range(2, 14))
        after = [*prompt, *mixed.token_ids.tolist(), 1]
        completion = await engine.generate(after, SamplingParams(max_tokens=3))
        assert completion.cached_tokens == len(after) - 2
        expected = plain_logprobs(tiny.model(number), [*after, *completion.token_ids.tolist()], len(after))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_siblings_branch_from_one_beginning_and_a_full_cache_preempts_as_before(root: Path) -> None:
    tiny = TinyModel(root=root)
    memory_mb = (2 * MAX_LEN + 6 * 64) * BYTES_A_TOKEN["llama"] / 1e6
    system = some_prompts(1, 40, 40, seed=4)[0]
    async with embedded(tiny, prefix_cache_least=16, kv_memory_mb=memory_mb, max_running=16) as engine:
        await engine.generate(system, SamplingParams(max_tokens=2))
        prompts = [[*system, *tail] for tail in some_prompts(4, 3, 6, seed=5)]
        asked = [prompt for prompt in prompts for _ in range(3)]
        answers = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=100)) for p in asked))
        one = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=1)) for p in asked))
        assert engine.parts.scheduler.preemptions > 0
        assert engine.parts.scheduler.prefixes.num_tokens <= MAX_LEN + 6 * 64
    for prompt, answer in zip([*asked, *asked], [*answers, *one], strict=True):
        assert_faithful(tiny, prompt, answer)
    assert sum(answer.cached_tokens >= len(system) for answer in answers) >= 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_store_gives_back_exactly_what_was_kept_within_its_bound(data: st.DataObject) -> None:
    """Rows hold their own tokens as numbers, so that what is given back can be read."""
    slots = SlotCache([LayerShape(1, 1, 1)], dtype=torch.float32, device=torch.device("cpu"))
    slots.resize(2, 128)
    store = PrefixCache(slots, max_tokens=200, min_length=8)
    words = st.lists(st.integers(0, 1), min_size=9, max_size=90)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(words)
        if data.draw(st.booleans()):
            slots.pairs[0][0][0, 0, : len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)
            kept = store.copy_out(0, len(tokens), weights_generation=store.weights_generation)
            if kept is not None:
                store.add(tokens, kept, weights_generation=store.weights_generation)
            assert store.num_tokens <= 200
        elif (hit := store.find(tokens)) is not None:
            assert 8 <= hit.length < len(tokens)
            slots.zero_rows([1])
            store.copy_in(hit, 1)
            found = slots.pairs[0][0][1, 0, : hit.length, 0].to(torch.int64).tolist()
            assert found == tokens[: hit.length]
    store.weights_changed()
    assert (len(store), store.num_tokens, store.find([0] * 90)) == (0, 0, None)
