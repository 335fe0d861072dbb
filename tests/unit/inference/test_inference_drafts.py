"""Speculative decoding: drafts change how many tokens a round gives, and neither the tokens nor their logprobs."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.drafts import PromptLookup
from rollbook.inference.engines.embedded import build
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.request import GenerationRequest
from tests.parts.inference.engines import TinyModel, embedded, engine_config, until
from tests.parts.inference.models import VOCAB

BLOCKS = pytest.mark.parametrize("is_captured", [True, False], ids=["blocks", "slots"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(autouse=True)
def exact_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, a float32 logprob has the same bits in every batch, as it has on a GPU."""
    monkeypatch.setitem(build.TOLERANCE, torch.float64, 1e-3)


@asynccontextmanager
async def engine_with(
    root: Path, draft_tokens: int, *, is_captured: bool, **settings: Any
) -> AsyncIterator[TransformersEngine]:
    tiny = TinyModel(root=root)
    # Few and small steps, so that an engine opens fast.
    small = {"kv_memory_mb": 16.0, "max_running": 8, "forward_tokens": 128}
    settings = {**small, "draft_tokens": draft_tokens, **settings}
    config = engine_config("transformers", **settings).model_copy(update={"dtype": "float64"})
    options: dict[str, Any] = {"capture": lambda operation: operation} if is_captured else {}
    async with open_engine(config, tiny.model_dir, **options) as engine:
        await engine.load_weights(*tiny.weights(1))
        yield engine


def repeating_prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    phrases = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 9))] for _ in range(count)]
    return [phrase * rng.randint(1, 6) for phrase in phrases]


def samplings(count: int) -> list[SamplingParams]:
    """Greedy and sampled, truncated, with stop tokens and reported likeliest tokens, of many lengths."""
    rng = random.Random(8)
    return [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 17, 60, 90]),
            temperature=rng.choice([0.0, 0.2, 0.5, 1.0]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            stop_token_ids=rng.choice([(), (), (3,), (5, 9)]),
            top_logprobs=rng.choice([0, 0, 2]),
            seed=number,
        )
        for number in range(count)
    ]


def assert_equal(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.versions.tolist() == other.versions.tolist()
        assert one.finish_reason is other.finish_reason
        if other.tops is not None:
            assert one.tops is not None
            assert one.tops.token_ids.tolist() == other.tops.token_ids.tolist()
            np.testing.assert_allclose(one.tops.logprobs, other.tops.logprobs, atol=1e-5)


@BLOCKS
async def test_tokens_and_logprobs_are_those_of_decoding_one_by_one_to_the_bit(root: Path, is_captured: bool) -> None:
    prompts, ways = repeating_prompts(14), samplings(14)
    found: dict[int, list[Completion]] = {}
    for drafts in (0, 7):
        async with engine_with(root, drafts, is_captured=is_captured, max_running=6) as engine:
            found[drafts] = await asyncio.gather(*map(engine.generate, prompts, ways))
            # The next turns find the answers in the prefix cache.
            turns = [
                [*prompt, *done.token_ids.tolist(), 4, 5] for prompt, done in zip(prompts, found[drafts], strict=True)
            ]
            found[drafts] += await asyncio.gather(*map(engine.generate, turns, ways))
            stats = engine.stats()
        assert (stats.drafted_tokens > stats.accepted_tokens > 0) is (drafts > 0)
        assert stats.tokens == sum(len(completion.token_ids) for completion in found[drafts])
        assert_equal(found[drafts], found[0])


@BLOCKS
async def test_rows_without_memory_are_preempted_and_draft_again(root: Path, is_captured: bool) -> None:
    prompts = repeating_prompts(8)
    ways = [SamplingParams(max_tokens=100, temperature=0.3, seed=number) for number in range(8)]
    memory = 0.3 if is_captured else 1.0  # MB
    expected: list[Completion] = []
    for drafts in (0, 8):
        async with engine_with(root, drafts, is_captured=is_captured, kv_memory_mb=memory) as engine:
            found = await asyncio.gather(*map(engine.generate, prompts, ways))
            assert engine.parts.scheduler.preemptions > 0
            assert (engine.stats().accepted_tokens > 0) is (drafts > 0)
        expected = expected or found
        assert_equal(found, expected)


@BLOCKS
async def test_a_request_that_is_preempted_with_a_draft_drops_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    prompt, greedy = [5, 6, 7, 8] * 5, SamplingParams(max_tokens=60, temperature=0.0)
    async with engine_with(root, 8, is_captured=is_captured) as engine:
        expected = await engine.generate(prompt, greedy)
        scheduler = engine.parts.scheduler
        to_preempt, most = scheduler.batch.to_preempt, scheduler.preemptions + 3

        def preempt_drafted() -> list[GenerationRequest]:
            drafted = [request for request in scheduler.table.requests() if len(request.draft) > 1]
            return drafted if scheduler.preemptions < most else to_preempt()

        monkeypatch.setattr(scheduler.batch, "to_preempt", preempt_drafted)
        found = await engine.generate(prompt, greedy)
        assert scheduler.preemptions == most
    assert_equal([found], [expected])


@BLOCKS
@pytest.mark.parametrize("kv_after_update", ["keep", "recompute"])
async def test_weights_change_and_requests_are_cancelled_between_drafts(
    root: Path, is_captured: bool, kv_after_update: str
) -> None:
    tiny, prompts = TinyModel(root=root), repeating_prompts(6)
    greedy = SamplingParams(max_tokens=120, temperature=0.0)
    async with engine_with(
        root, 6, is_captured=is_captured, kv_after_update=kv_after_update, prefix_cache_share=0.0
    ) as engine:
        futures = [engine.submit(prompt, greedy) for prompt in prompts]
        await until(lambda: engine.stats().tokens > 90)
        futures[0].cancel()
        await engine.load_weights(*tiny.weights(2))
        completions = await asyncio.gather(*futures[1:])
        assert engine.stats().accepted_tokens > 0
        await until(lambda: engine.stats().running == 0)
    if kv_after_update == "keep":
        return
    assert any({1, 2} <= set(completion.versions.tolist()) for completion in completions)
    # Each token is the likeliest of the version that it is stamped with.
    for prompt, completion in zip(prompts[1:], completions, strict=True):
        tokens = [*prompt, *completion.token_ids.tolist()]
        for version in (1, 2):
            with torch.inference_mode():
                logits = tiny.model(version)(input_ids=torch.tensor([tokens])).logits[0]
            at = np.flatnonzero(completion.versions == version)
            assert logits.argmax(dim=-1)[at + len(prompt) - 1].tolist() == completion.token_ids[at].tolist()


class EvenTokens:
    """Allows even tokens only, and remembers what was sampled."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.packbits(np.arange(VOCAB) % 2 == 0, bitorder="little")

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@BLOCKS
async def test_a_constrained_request_has_no_draft_and_runs_next_to_requests_that_have(
    root: Path, is_captured: bool
) -> None:
    prompts, sampling = repeating_prompts(5), SamplingParams(max_tokens=40, temperature=0.4, seed=3)
    found: list[list[Completion]] = []
    for drafts in (0, 5):
        async with engine_with(root, drafts, is_captured=is_captured) as engine:
            constraint = EvenTokens()
            futures = [engine.submit(prompt, sampling) for prompt in prompts]
            futures.append(engine.submit(prompts[0], sampling, constraint=constraint))
            found.append(list(await asyncio.gather(*futures)))
            assert constraint.accepted == found[-1][-1].token_ids.tolist()
            assert all(token % 2 == 0 for token in constraint.accepted)
    assert_equal(found[1], found[0])


async def test_samples_without_seeds_follow_the_same_distribution(root: Path) -> None:
    sampling, prompt, count = SamplingParams(max_tokens=16, temperature=0.3), [7, 8, 9] * 3, 300
    shares = []
    for drafts in (0, 4):
        async with engine_with(root, drafts, is_captured=False, seed=drafts, max_running=64) as engine:
            drawn = await asyncio.gather(*(engine.generate(prompt, sampling) for _ in range(count)))
            last = [int(completion.token_ids[-1]) for completion in drawn]
        shares.append(np.bincount(last, minlength=VOCAB) / count)
        assert (engine.stats().accepted_tokens > 100) is (drafts > 0)
    # Five standard deviations of the difference of two frequencies with p = 0.5.
    assert np.abs(shares[0] - shares[1]).max() < 5 * (0.5 / count) ** 0.5


def test_a_draft_continues_the_last_place_with_the_same_tokens() -> None:
    lookup = PromptLookup(np.array([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3], dtype=np.int32), most=4)
    assert lookup.draft(4) == [6, 7, 1, 2]
    assert lookup.draft(1) == [6]
    assert lookup.draft(0) == []
    lookup.extend(np.array([9], dtype=np.int32))
    assert lookup.draft(4) == []
    lookup.extend(np.array([3, 4, 5], dtype=np.int32))
    assert lookup.draft(4) == [1, 2, 3, 6]


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    assert PromptLookup(np.array([8, 9, 8, 9, 8, 9], dtype=np.int32), most=5).draft(5) == [8, 9, 8, 9, 8]
    assert PromptLookup(np.array([4, 4, 4, 4], dtype=np.int32), most=6).draft(6) == [4] * 6
    assert PromptLookup(np.array([4, 4], dtype=np.int32), most=6).draft(6) == []


def test_a_long_context_is_indexed_as_a_short_one() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, 500).astype(np.int32)
    whole, in_parts = PromptLookup(tokens, most=9), PromptLookup(tokens[:2], most=9)
    for start in range(2, 500, 7):
        in_parts.extend(tokens[start : start + 7])
    assert whole.draft(9) == in_parts.draft(9)
    assert len(whole.draft(9)) == 9


def test_wrong_drafts_become_shorter_and_right_ones_longer_again() -> None:
    lookup = PromptLookup(np.array([4] * 9, dtype=np.int32), most=8)
    lookup.sampled(drafted=8, accepted=1)
    assert len(lookup.draft(8)) == 4
    for _ in range(4):
        lookup.sampled(drafted=4, accepted=0)
    assert len(lookup.draft(8)) == 1
    lookup.sampled(drafted=1, accepted=1)
    lookup.sampled(drafted=2, accepted=2)
    assert len(lookup.draft(8)) == 4
    lookup.sampled(drafted=0, accepted=0)
    assert len(lookup.draft(8)) == 4


async def test_drafts_are_refused_where_they_are_not_possible(root: Path) -> None:
    with pytest.raises(RunError, match=r"draft_tokens needs the fast forward"):
        async with engine_with(root, 2, is_captured=False, forward="module"):
            pass
    with pytest.raises(RunError, match=r"draft_tokens needs attention in all layers"):
        async with embedded(TinyModel(root=root, kind="qwen3_5_text"), draft_tokens=2, kv_memory_mb=10):
            pass
    with pytest.raises(ValidationError, match="steps_ahead exclude each other"):
        InferenceConfig(draft_tokens=2, steps_ahead=1)
    with pytest.raises(ValidationError, match="settings of its own"):
        InferenceConfig(draft_tokens=2, engine="vllm")
