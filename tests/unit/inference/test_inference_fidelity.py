"""The embedded engine's logprobs equal those of a plain forward without a cache."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.weights import WeightsError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine, GenerationError
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.pause import PauseMode
from rollbook.numerics.machine import ProbedAnswer
from tests.parts.inference.engines import TinyModel, embedded, next_step, until
from tests.parts.inference.models import VOCAB, plain_logprobs, publish, write_weights

KINDS = ["llama", "qwen2", "qwen3", "gpt2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fidelity")


def prompts_of_many_lengths(count: int, *, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def assert_faithful(
    model: Any, prompt: list[int], completion: Completion, *, temperature: float = 1.0, start: int = 0
) -> None:
    tokens = [*prompt, *completion.token_ids.tolist()]
    expected = plain_logprobs(model, tokens, len(prompt) + start, temperature=temperature)
    np.testing.assert_allclose(completion.logprobs[start:], expected, atol=1e-4)


async def play(engine: Engine, prompts: list[list[int]], *, temperature: float = 1.0) -> list[Completion]:
    """Requests of many lengths that arrive in waves, so that rows join, leave and move."""
    rng = random.Random(1)
    futures = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=rng.choice([1, 2, 5, 30]), temperature=temperature, stop_token_ids=(3,))
        futures.append(engine.submit(prompt, sampling))
        if index % 9 == 8:
            await next_step(engine)
    return list(await asyncio.gather(*futures))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampling_logprobs_equal_those_of_a_plain_forward(root: Path, kind: str, temperature: float) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = prompts_of_many_lengths(40)
    async with tiny.engine("transformers", max_running=8) as engine:
        completions = await play(engine, prompts, temperature=temperature)
    model = tiny.model(1)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(model, prompt, completion, temperature=temperature)


async def test_greedy_takes_the_most_likely_token_and_reports_its_logprob_at_temperature_one(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with tiny.engine("transformers") as engine:
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
    model = tiny.model(1)
    tokens = [1, 2, 3]
    for token in completion.token_ids.tolist():
        with torch.inference_mode():
            assert int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens.append(token)
    assert_faithful(model, [1, 2, 3], completion)


async def test_samples_follow_the_models_distribution(root: Path) -> None:
    tiny = TinyModel(root=root)
    count = 4000
    async with tiny.engine("transformers") as engine:
        drawn = await asyncio.gather(*(engine.generate([5, 6], SamplingParams(max_tokens=1)) for _ in range(count)))
    frequency = np.bincount([int(completion.token_ids[0]) for completion in drawn], minlength=VOCAB) / count
    with torch.inference_mode():
        expected = tiny.model(1)(input_ids=torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).numpy()
    # Five standard deviations of a binomial frequency with p = 0.5.
    assert np.abs(frequency - expected).max() < 5 * (0.25 / count) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
async def test_after_recompute_every_token_depends_on_the_new_weights_only(root: Path, kind: str) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = prompts_of_many_lengths(6, seed=3)
    sampling = SamplingParams(max_tokens=60)
    async with tiny.engine("transformers", kv_after_update="recompute") as engine:
        futures = [engine.submit(prompt, sampling) for prompt in prompts]
        await until(lambda: engine.stats().tokens > 30)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        completions = await asyncio.gather(*futures)
    for prompt, completion in zip(prompts, completions, strict=True):
        changed = int((completion.versions == 1).sum())
        assert 0 < changed < 60
        assert_faithful(tiny.model(2), prompt, completion, start=changed)


async def test_a_prompt_that_an_update_meets_is_prefilled_again(root: Path) -> None:
    """In the packed steps of a GPU: a first token reads keys of its own version only."""
    tiny = TinyModel(root=root)
    prompts = [[(3 * at + number) % VOCAB for at in range(100)] for number in range(4)]
    config = InferenceConfig(max_running=4, step_prefill_tokens=2, kv_memory_mb=8.0)
    async with open_engine(config, tiny.model_dir, capture=lambda operation: operation) as engine:
        await engine.load_weights(*tiny.weights(1))
        futures = [engine.submit(prompt, SamplingParams(max_tokens=4)) for prompt in prompts]
        await until(lambda: engine.stats().steps > 10)
        await engine.load_weights(*tiny.weights(2))
        completions = await asyncio.gather(*futures)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.versions.tolist() == [2] * 4
        assert_faithful(tiny.model(2), prompt, completion)


@pytest.mark.parametrize("is_captured", [True, False])
async def test_the_probe_of_a_start_samples_the_same_prompts_in_several_ways(root: Path, is_captured: bool) -> None:
    tiny, found = TinyModel(root=root), list[ProbedAnswer]()

    def compare(module: Any, answers: Sequence[ProbedAnswer]) -> None:
        found.extend(answers)
        for answer in answers:
            tokens = [*answer.prompt.tolist(), *answer.tokens.tolist()]
            expected = plain_logprobs(module, tokens, len(answer.prompt), temperature=answer.temperature)
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)

    async with embedded(tiny, is_captured=is_captured, kv_memory_mb=8.0) as engine:
        await engine.check_exactness(compare)
        cached, rounds = engine.stats().cached_tokens, engine.stats().steps
        after = await engine.generate(found[-1].prompt, SamplingParams(max_tokens=3))
        assert engine.stats().cached_tokens == cached
    alone, together = ([a for a in found if a.how == how] for how in ("one at a time", "in a batch"))
    assert len(alone) == 4
    assert cached > 0
    assert rounds == 0
    assert len(after.token_ids) == 3
    for answer in alone:
        twin = next(other for other in together if np.array_equal(other.prompt, answer.prompt))
        assert np.array_equal(twin.tokens, answer.tokens)  # the same seeds
    assert {a.how for a in found} == {"one at a time", "after a cached turn", "in a batch"}


async def test_an_engine_whose_probe_differs_is_not_exact_and_says_which_operations_depend_on_the_batch(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.nn.functional.linear

    def depends_on_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return plain(x, weight, bias) * (1.0 if len(x) > 2 or len(weight) != VOCAB else 1.001)

    async with embedded(TinyModel(root=root), is_captured=True, kv_memory_mb=8.0) as engine:
        monkeypatch.setattr(torch.nn.functional, "linear", depends_on_rows)
        await engine.check_exactness(lambda _module, _answers: "3 of 9 logprobs have other bits")
        assert engine.exactness.inexact_because == "the check at its start found other bits than the trainer's"
        await engine.check_exactness(lambda _module, _answers: 1 / 0)  # type: ignore[return-value, arg-type]  # it fails
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2))).token_ids) == 2
    (different, failed) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert different.startswith("logprobs are not exact: 3 of 9 logprobs have other bits. ")
    assert "product lm_head with 1, 2" in different
    assert "inference.exactness" in different
    assert "ZeroDivisionError" in failed


async def test_after_keep_the_cache_holds_keys_of_the_old_weights(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with tiny.engine("transformers", kv_after_update="keep") as engine:
        future = engine.submit([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=60))
        await until(lambda: engine.stats().tokens > 5)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        completion = await future
    changed = int((completion.versions == 1).sum())
    tokens = [1, 2, 3, 4, 5, 6, *completion.token_ids.tolist()]
    fresh = plain_logprobs(tiny.model(2), tokens, 6 + changed)
    assert np.abs(completion.logprobs[changed:] - fresh).max() > 1e-3


async def test_an_update_clears_the_logits_of_repeated_prompts(root: Path) -> None:
    tiny = TinyModel(root=root)
    one = SamplingParams(max_tokens=1)
    async with tiny.engine("transformers") as engine:
        for number in (1, 2):
            await engine.load_weights(*tiny.weights(number))
            before = engine.stats().forwards
            first = await engine.generate([7, 8, 9], one)
            second = await engine.generate([7, 8, 9], one)
            # The second request uses the logits of the first: the same prompt with the same weights.
            assert engine.stats().forwards == before + 1
            for completion in (first, second):
                assert completion.versions.tolist() == [number]
                assert_faithful(tiny.model(number), [7, 8, 9], completion)


async def test_siblings_with_one_prompt_share_its_prefill_and_sample_different_tokens(root: Path) -> None:
    tiny = TinyModel(root=root)
    prompt = [4, 9, 2, 7]
    async with tiny.engine("transformers") as engine:
        await engine.pause(PauseMode.KEEP)
        siblings = [engine.submit(prompt, SamplingParams(max_tokens=12, seed=number)) for number in range(8)]
        await engine.resume()
        completions = await asyncio.gather(*siblings)
        assert engine.stats().forwards == 1 + 11
    assert len({tuple(completion.token_ids.tolist()) for completion in completions}) > 1
    for completion in completions:
        assert_faithful(tiny.model(1), prompt, completion)


async def test_nan_logits_fail_their_request_and_the_engine_continues(root: Path, tmp_path: Path) -> None:
    tiny = TinyModel(root=root)
    broken = tiny.model(1)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    async with tiny.engine("transformers") as engine:
        running = engine.submit([1, 2], SamplingParams(max_tokens=100))
        await until(lambda: engine.stats().tokens >= 2)
        path = tmp_path / "broken.safetensors"
        await engine.load_weights(publish(path, broken, 2), path)
        with pytest.raises(GenerationError, match="publication 2 has logits that are not numbers"):
            await running
        with pytest.raises(GenerationError, match="at position 3"):
            await engine.generate([1, 2, 3], SamplingParams(max_tokens=1))
        await engine.load_weights(*tiny.weights(3))
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=20))
    assert_faithful(tiny.model(3), [1, 2, 3], completion)


async def test_nan_keys_do_not_stay_in_a_slot(root: Path, tmp_path: Path) -> None:
    tiny = TinyModel(root=root)
    broken = tiny.model(1)
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    async with tiny.engine("transformers") as engine:
        running = engine.submit([1, 2], SamplingParams(max_tokens=100))
        await until(lambda: engine.stats().tokens >= 20)
        path = tmp_path / "broken.safetensors"
        await engine.load_weights(publish(path, broken, 2), path)
        with pytest.raises(GenerationError):
            await running
        await engine.load_weights(*tiny.weights(3))
        # Too different in length to share a prefill: the short request gets the slot of the failed one, and the long request
        # makes its attention read the masked positions that were written there.
        prompts = [[1], [n % VOCAB for n in range(100)]]
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=9)) for p in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny.model(3), prompt, completion)


async def test_the_weights_are_digested_while_steps_run(root: Path) -> None:
    """A trainer has them digested after each publication in GPU memory: a model of 1.5B would not decode for half a second."""
    tiny = TinyModel(root=root)
    publication, path = tiny.weights(2)
    is_over = threading.Event()

    def long_round() -> None:
        is_over.wait()

    async with embedded(tiny) as engine:
        await engine.load_weights(publication, path)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.thread.between_rounds(long_round), name="long round")
            try:
                assert await asyncio.wait_for(engine.weights_digest(), 60) == publication.digest
            finally:
                is_over.set()


async def test_weights_of_another_model_are_refused_and_nothing_changes(root: Path, tmp_path: Path) -> None:
    tiny = TinyModel(root=root)
    path = tmp_path / "other.safetensors"
    async with tiny.engine("transformers") as engine:
        with pytest.raises(WeightsError, match=r"transformer\.h"):
            await engine.load_weights(publish(path, TinyModel(root=root, kind="gpt2").model(1), 2), path)
        model = tiny.model(2)
        del model.lm_head
        with pytest.raises(WeightsError, match=r"lack tensors.*lm_head\.weight"):
            await engine.load_weights(publish(path, model, 2), path)
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=5))
    assert completion.versions.tolist() == [1] * 5
    assert_faithful(tiny.model(1), [1, 2, 3], completion)


async def test_tied_weights_are_published_once_and_change_both_matrices(root: Path, tmp_path: Path) -> None:
    tiny = TinyModel(root=root, kind="qwen2")
    path = tmp_path / "tied.safetensors"
    digest = write_weights(path, tiny.model(2))
    published, _ = tiny.weights(2)
    assert published.digest == digest
    async with tiny.engine("transformers") as engine:
        await engine.load_weights(published, path)
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=10))
    assert_faithful(tiny.model(2), [1, 2, 3], completion)


async def test_a_sequence_can_outgrow_the_initial_cache(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with tiny.engine("transformers") as engine:
        short = engine.submit([3], SamplingParams(max_tokens=200))
        await until(lambda: engine.stats().tokens > 5)
        others = [engine.submit([n], SamplingParams(max_tokens=150)) for n in range(5)]
        completion = await short
        await asyncio.gather(*others)
    assert_faithful(tiny.model(1), [3], completion)
