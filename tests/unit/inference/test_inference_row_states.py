"""Models with windows, attention sinks, recurrent states and shared keys in the embedded engine: rows of different lengths that
join, leave, move and continue have the logprobs of a plain forward.

They run through their module, with the caches of transformers (`KINDS`), or on the fast forward, with states in lines of the slots
(`FAST`)."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.weights import Adapter
from rollbook.inference.engines.batching import SlotBudget
from rollbook.inference.engines.embedded.captured_runner import CapturedRunner
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.engines.embedded.model.fixed_states import FixedStates
from rollbook.inference.pause import PauseMode
from rollbook.inference.weights.lora import read_adapter
from tests.models.families import family
from tests.parts.inference.adapters import make_adapter
from tests.parts.inference.engines import (
    TinyModel,
    assert_faithful,
    embedded,
    engine_config,
    next_step,
    some_prompts,
    until,
)
from tests.parts.inference.models import plain_logprobs

KINDS = [
    "gpt_oss",  # windows and sinks
    "qwen3_5_text",  # gated delta layers
    pytest.param("falcon_h1", marks=pytest.mark.slow),  # a state and keys in the same layer
    pytest.param("lfm2", marks=pytest.mark.slow),  # convolutions
    pytest.param("gemma3n_text", marks=pytest.mark.slow),  # keys shared by layers
    pytest.param("jamba", marks=pytest.mark.slow),  # a state that is continued token by token
]
FAST = "qwen3_5_text on the fast forward"
SETTINGS: dict[str, Any] = {"max_model_len": 128, "kv_memory_mb": 20, "prefix_cache_least": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def prepared(root: Path, kind: str, **settings: Any) -> tuple[TinyModel, dict[str, Any]]:
    """The model, and the settings of its engine."""
    model_type, _, forward = kind.partition(" on the ")
    return TinyModel(root=root, kind=model_type), {**SETTINGS, "forward": "auto" if forward else "module", **settings}


def sampling_of(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=(1, 2, 5, 24)[index % 4], stop_token_ids=(3,))


@pytest.mark.parametrize("kind", [*KINDS, FAST])
async def test_rows_that_join_and_leave_have_the_logprobs_of_a_plain_forward(root: Path, kind: str) -> None:
    # Prompts are prefilled in pieces, most of them in several rounds while other rows decode.
    tiny, settings = prepared(root, kind, max_running=5, forward_tokens=8, step_prefill_tokens=16)
    prompts = some_prompts(10, 1, 40)
    async with embedded(tiny, **settings) as engine:
        assert engine.parts.choices[0].startswith("forward: llama") is (kind == FAST)
        assert engine.parts.model.is_dense is (kind == FAST)
        futures = []
        for index, prompt in enumerate(prompts):
            futures.append(engine.submit(prompt, sampling_of(index)))
            if index % 4 == 3:
                await next_step(engine)
        completions = await asyncio.gather(*futures)
        # The next turn continues the state of the first, which covers all but its last token.
        turns = [[*p, *c.token_ids.tolist(), 9, 8, 7] for p, c in zip(prompts, completions, strict=True)]
        continued = await asyncio.gather(*(engine.generate(turn, sampling_of(3)) for turn in turns))
        assert engine.stats().cached_tokens > 50
    for prompt, completion in [*zip(prompts, completions, strict=True), *zip(turns, continued, strict=True)]:
        assert_faithful(tiny, prompt, completion)


@pytest.mark.slow
async def test_a_cache_that_cannot_be_merged_decodes_row_by_row(root: Path) -> None:
    tiny, settings = prepared(root, "deepseek_v4", max_running=3)
    prompts = some_prompts(3, 5, 20)
    async with embedded(tiny, **settings) as engine:
        assert "one forward for each row" in " ".join(engine.parts.choices)
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=6)) for p in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("kind", ["qwen3_5_text", FAST])
async def test_siblings_copy_the_state_of_one_prefill(root: Path, kind: str) -> None:
    tiny, settings = prepared(root, kind)
    prompt = some_prompts(1, 20, 20)[0]
    async with embedded(tiny, **settings) as engine:
        await engine.pause(PauseMode.KEEP)
        before = engine.stats().forwards
        siblings = [engine.submit(prompt, SamplingParams(max_tokens=12, seed=number)) for number in range(6)]
        await engine.resume()
        completions = await asyncio.gather(*siblings)
        assert engine.stats().forwards == before + 1 + 11
    assert len({tuple(completion.token_ids.tolist()) for completion in completions}) > 1
    for completion in completions:
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text", FAST])
async def test_a_prompt_that_leaves_a_cached_state_before_its_end_is_prefilled_from_the_start(
    root: Path, kind: str
) -> None:
    tiny, settings = prepared(root, kind)
    prompt = some_prompts(1, 30, 30)[0]
    async with embedded(tiny, **settings) as engine:
        await engine.generate(prompt, SamplingParams(max_tokens=8))
        before = engine.stats().cached_tokens
        # The same first 25 tokens: keys of full attention would be reused, a state of 37 tokens is not.
        other = [*prompt[:25], 5, 5, 5]
        completion = await engine.generate(other, SamplingParams(max_tokens=8))
        assert engine.stats().cached_tokens == before
    assert_faithful(tiny, other, completion)


@pytest.mark.parametrize(("kind", "memory_mb"), [("falcon_h1", 0.24), (FAST, 0.08)])
async def test_preempted_rows_continue_with_the_same_distribution(root: Path, kind: str, memory_mb: float) -> None:
    tiny, settings = prepared(root, kind, max_running=8, kv_memory_mb=memory_mb, prefix_cache_share=0.0)
    prompts = some_prompts(8, 10, 40)
    async with embedded(tiny, **settings) as engine:
        futures = [engine.submit(prompt, SamplingParams(max_tokens=60)) for prompt in prompts]
        completions = await asyncio.gather(*futures)
        assert engine.parts.scheduler.preemptions > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("kind", ["gpt_oss", FAST])
async def test_after_recompute_a_state_depends_on_the_new_weights_only(root: Path, kind: str) -> None:
    tiny, settings = prepared(root, kind, kv_after_update="recompute")
    prompts = some_prompts(4, 5, 30)
    async with embedded(tiny, **settings) as engine:
        futures = [engine.submit(prompt, SamplingParams(max_tokens=50)) for prompt in prompts]
        await until(lambda: engine.stats().tokens > 20)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        completions = await asyncio.gather(*futures)
    for prompt, completion in zip(prompts, completions, strict=True):
        changed = int((completion.versions == 1).sum())
        assert 0 < changed < 50
        tokens = [*prompt, *completion.token_ids.tolist()]
        expected = plain_logprobs(tiny.model(2), tokens, len(prompt) + changed)
        np.testing.assert_allclose(completion.logprobs[changed:], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5_text", FAST])
async def test_rows_with_and_without_an_adapter_share_a_step(root: Path, tmp_path: Path, kind: str) -> None:
    tiny, forward = prepared(root, kind)
    adapter_dir = make_adapter(tmp_path / "adapter", tiny.model_dir)
    prompts = some_prompts(4, 5, 20)
    async with embedded(tiny, **forward) as engine:
        settings, tensors = read_adapter(adapter_dir)
        await engine.load_adapter(Adapter(name="tuned", settings=settings), tensors)
        models = ["tuned", None, "tuned", None]
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(max_tokens=8), adapter=model)
                for prompt, model in zip(prompts, models, strict=True)
            )
        )
    tuned = PeftModel.from_pretrained(tiny.model(1), str(adapter_dir)).eval()
    for prompt, model, completion in zip(prompts, models, completions, strict=True):
        tokens = [*prompt, *completion.token_ids.tolist()]
        expected = plain_logprobs(tuned if model else tiny.model(1), tokens, len(prompt))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_the_fixed_memory_of_a_row_counts_in_the_budget() -> None:
    budget = SlotBudget(max_rows=100, max_length=256, max_tokens=10_000, row_tokens=436)
    assert budget.rows_for(64) == 20
    with pytest.raises(ValueError, match="does not hold one sequence"):
        SlotBudget(max_rows=1, max_length=256, max_tokens=600, row_tokens=436)


async def test_a_rotation_that_changes_with_the_longest_row_of_a_batch_limits_the_length(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**family("phi3").settings, "original_max_position_embeddings": 64}
    settings["rope_parameters"] = {**settings["rope_parameters"], "original_max_position_embeddings": 64}
    replace(family("phi3"), settings=settings).model().save_pretrained(tmp_path)
    for length in (None, 65):
        with pytest.raises(RunError, match=r"\(longrope\) changes for a whole batch .* at most 64"):
            async with open_engine(engine_config("transformers", kv_memory_mb=20, max_model_len=length), tmp_path):
                pass
    async with open_engine(engine_config("transformers", kv_memory_mb=20, max_model_len=64), tmp_path) as engine:
        assert engine.parts.choices[0].startswith("forward: llama")


async def test_a_model_without_a_limit_of_length_needs_max_model_len(root: Path) -> None:
    tiny = TinyModel(root=root, kind="mamba2")
    with pytest.raises(RunError, match=r"set inference\.max_model_len"):
        async with embedded(tiny, kv_memory_mb=20):
            pass


async def test_a_row_that_moved_leaves_no_state_behind(root: Path) -> None:
    tiny, settings = prepared(root, "qwen3_5_text", max_running=6)
    prompts = some_prompts(18, 3, 40)
    async with embedded(tiny, is_captured=True, **settings) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, CapturedRunner)
        assert isinstance(slots := runner.slots, FixedStates)
        # Those that joined first end first, so the rows after them move.
        limits = [3 + 37 * number % 60 for number in range(len(prompts))]
        completions = await asyncio.gather(
            *(engine.generate(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts, limits, strict=True))
        )
        await until(lambda: engine.stats().running == 0)
        assert (slots._lengths, slots._alone) == ({}, {})
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)
