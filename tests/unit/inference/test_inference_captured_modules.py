"""Captured decode steps of Hugging Face modules, and of the fast forward over recurrent states (`FAST`): what a repetition computes
without Python has the logprobs of a plain forward, for rows that join, leave, grow and move. The capture records operations and
repeats them on the same tensors, which must not move."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor

from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.weights import Adapter
from rollbook.inference.engines.embedded.captured_runner import CapturedRunner, captured_error
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.model.capture import HostWaitError, HostWaits
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.model.module import StateForward
from rollbook.inference.pause import PauseMode
from rollbook.inference.weights.lora import read_adapter
from tests.models.families import family
from tests.parts.inference.adapters import make_adapter
from tests.parts.inference.engines import TinyModel, assert_faithful, embedded, next_step, some_prompts, until
from tests.parts.inference.models import plain_logprobs
from tests.parts.inference.recording import RecordingCapture

KINDS = [
    "gpt2",  # full attention, in slots
    "gpt_oss",  # windows and sinks
    "qwen3_5_text",  # gated delta layers
    pytest.param("falcon_h1", marks=pytest.mark.slow),  # a state and keys in the same layer
    pytest.param("gemma3n_text", marks=pytest.mark.slow),  # keys shared by layers
]
FAST = "qwen3_5_text on the fast forward"
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "kv_memory_mb": 20,
    "prefix_cache_least": 8,
    "forward": "module",
    "is_captured": True,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captured")


def prepared(root: Path, kind: str, **settings: Any) -> tuple[TinyModel, dict[str, Any]]:
    """The model, and the settings of its engine."""
    model_type, _, forward = kind.partition(" on the ")
    return TinyModel(root=root, kind=model_type), {**SETTINGS, "forward": "auto" if forward else "module", **settings}


def runner_of(engine: TransformersEngine) -> CapturedRunner:
    runner = engine.parts.runner
    assert isinstance(runner, CapturedRunner), engine.parts.choices
    return runner


def replays(engine: TransformersEngine) -> int:
    capture: Any = runner_of(engine)._capture
    assert isinstance(capture, RecordingCapture)
    return capture.replays


@pytest.mark.parametrize("kind", [*KINDS, FAST])
async def test_repeated_steps_have_the_logprobs_of_a_plain_forward(root: Path, kind: str) -> None:
    tiny, settings = prepared(root, kind, max_running=3)
    prompts = some_prompts(7, 1, 40)
    samplings = [SamplingParams(max_tokens=(1, 2, 5, 24)[i % 4], stop_token_ids=(3,), seed=i) for i in range(7)]
    async with embedded(tiny, **settings) as engine:
        assert engine.parts.choices[0].startswith("forward: llama") is (kind == FAST)
        futures = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            futures.append(engine.submit(prompt, sampling))
            if index % 4 == 3:
                await next_step(engine)
        completions = await asyncio.gather(*futures)
        turns = [[*p, *c.token_ids.tolist(), 9, 8, 7] for p, c in zip(prompts, completions, strict=True)]
        continued = await asyncio.gather(*(engine.generate(turn, samplings[2]) for turn in turns))
        assert engine.stats().cached_tokens > 50
        # Most steps are repetitions; those of a new shape are not.
        assert replays(engine) > 2 * runner_of(engine).captures > 0
    for prompt, completion in [*zip(prompts, completions, strict=True), *zip(turns, continued, strict=True)]:
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("kind", ["gpt2", FAST])
async def test_new_weights_need_no_new_capture(root: Path, kind: str) -> None:
    tiny, settings = prepared(root, kind)
    prompt = some_prompts(1, 20, 20)[0]
    async with embedded(tiny, **settings) as engine:
        # The memory grows to its size, and the shape of the second request is captured.
        for _ in range(2):
            await engine.generate(prompt, SamplingParams(max_tokens=8))
        captures, before = runner_of(engine).captures, replays(engine)
        await engine.load_weights(*tiny.weights(2))
        completion = await engine.generate(prompt, SamplingParams(max_tokens=8))
        assert (runner_of(engine).captures, replays(engine)) == (captures, before + 7)
    expected = plain_logprobs(tiny.model(2), [*prompt, *completion.token_ids.tolist()], len(prompt))
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5_text", marks=pytest.mark.slow), FAST])
async def test_rows_with_different_adapters_share_a_repeated_step(root: Path, tmp_path: Path, kind: str) -> None:
    tiny, forward = prepared(root, kind)
    adapter_dir = make_adapter(tmp_path / "adapter", tiny.model_dir)
    prompts = some_prompts(4, 5, 20)
    models = ["tuned", None, "tuned", None]
    async with embedded(tiny, **forward) as engine:
        settings, tensors = read_adapter(adapter_dir)
        await engine.load_adapter(Adapter(name="tuned", settings=settings), tensors)
        requests = [
            engine.submit(prompt, SamplingParams(max_tokens=12), adapter=model)
            for prompt, model in zip(prompts, models, strict=True)
        ]
        completions = await asyncio.gather(*requests)
        assert replays(engine) > 5
    tuned = PeftModel.from_pretrained(tiny.model(1), str(adapter_dir)).eval()
    for prompt, model, completion in zip(prompts, models, completions, strict=True):
        tokens = [*prompt, *completion.token_ids.tolist()]
        expected = plain_logprobs(tuned if model else tiny.model(1), tokens, len(prompt))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "memory_mb"), [pytest.param("falcon_h1", 0.24, marks=pytest.mark.slow)])
async def test_preempted_and_moved_rows_continue_with_the_same_distribution(
    root: Path, kind: str, memory_mb: float
) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = some_prompts(8, 10, 40)
    settings = SETTINGS | {"kv_memory_mb": memory_mb, "prefix_cache_share": 0.0}
    async with embedded(tiny, max_running=8, **settings) as engine:
        futures = [engine.submit(prompt, SamplingParams(max_tokens=60)) for prompt in prompts]
        completions = await asyncio.gather(*futures)
        assert engine.parts.scheduler.preemptions > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5_text", marks=pytest.mark.slow), FAST])
async def test_a_state_that_was_continued_after_a_stop_token_is_not_reused(root: Path, kind: str) -> None:
    """With steps launched ahead, rows continue until the host has read the stop token, or reach their limit before."""
    tiny, settings = prepared(root, kind, steps_ahead=2)
    prompts = some_prompts(6, 10, 20)
    stopping = [SamplingParams(max_tokens=limit, stop_token_ids=tuple(range(64)), seed=5) for limit in (2, 3, 12)] * 2
    async with embedded(tiny, **settings) as engine:
        stopped = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, stopping, strict=True)))
        assert sum(len(one.token_ids) < s.max_tokens for one, s in zip(stopped, stopping, strict=True)) > 2
        turns = [[*p, *one.token_ids.tolist(), 9, 8] for p, one in zip(prompts, stopped, strict=True)]
        continued = await asyncio.gather(*(engine.generate(turn, SamplingParams(max_tokens=4)) for turn in turns))
    for turn, completion in zip(turns, continued, strict=True):
        assert_faithful(tiny, turn, completion)


async def test_after_recompute_a_line_has_the_state_of_the_new_weights(root: Path) -> None:
    tiny = TinyModel(root=root, kind="qwen3_5_text")
    prompts = some_prompts(3, 5, 30)
    async with embedded(tiny, kv_after_update="recompute", **SETTINGS) as engine:
        futures = [engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        await until(lambda: engine.stats().tokens > 20)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        completions = await asyncio.gather(*futures)
    for prompt, completion in zip(prompts, completions, strict=True):
        changed = int((completion.versions == 1).sum())
        tokens = [*prompt, *completion.token_ids.tolist()]
        expected = plain_logprobs(tiny.model(2), tokens, len(prompt) + changed)
        np.testing.assert_allclose(completion.logprobs[changed:], expected, atol=1e-4)


async def test_steps_that_wait_for_the_device_are_called_from_python_for_a_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root, kind="qwen3_5_text")
    called: Any = StateForward._called

    def waiting(self: StateForward, tokens_NC: Tensor, *args: Any) -> Tensor:
        assert int(tokens_NC.max()) < self.vocab_size
        logits: Tensor = called(self, tokens_NC, *args)
        return logits

    monkeypatch.setattr(StateForward, "_called", waiting)
    async with embedded(tiny, **SETTINGS) as engine:
        assert "called from Python, because HostWaitError: aten._local_scalar_dense" in " ".join(engine.parts.choices)
        assert not isinstance(engine.parts.runner, CapturedRunner)
        prompt = some_prompts(1, 20, 20)[0]
        assert_faithful(tiny, prompt, await engine.generate(prompt, SamplingParams(max_tokens=8)))


def test_the_step_that_is_tried_gets_no_numbers_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of rows would become a tensor that is copied to the device, which only a GPU refuses."""
    module = family("qwen3_5_text").model().requires_grad_(False)
    forward = LlamaForward(module, max_model_len=64)
    decode, found = forward.decode, []

    def watched(*args: Any, rows: Any, **options: Any) -> Tensor:
        found.append(rows)
        return decode(*args, rows=rows, **options)

    monkeypatch.setattr(forward, "decode", watched)
    assert captured_error(forward, module, RecordingCapture()) < 1e-5
    assert found == [range(2)] * 2


@pytest.mark.slow
async def test_chunks_of_attention_are_not_captured_and_the_model_runs(root: Path) -> None:
    """The chunk of a token depends on its position, which the mask of a captured step does not know."""
    tiny = TinyModel(root=root, kind="llama4_text")
    async with embedded(tiny, **SETTINGS) as engine:
        assert "a captured step has a relative error" in " ".join(engine.parts.choices)
        prompt = some_prompts(1, 20, 20)[0]
        assert_faithful(tiny, prompt, await engine.generate(prompt, SamplingParams(max_tokens=8)))


WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x.sum().item(),
    "a condition": lambda x: bool((x > 0).all()),
    "the places of a mask": lambda x: (x > 0).nonzero(),
    "an index by a mask": lambda x: x[x > 0],
    "writing many numbers by a mask": lambda x: x.__setitem__(x > 0, torch.zeros(6)),
    "a choice by a mask": lambda x: torch.masked_select(x, x > 0),
    "different values": torch.unique,
    "repetitions by number": lambda x: torch.repeat_interleave(torch.ones(6, dtype=torch.long)),
    "equality": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("operation", WAITING.values(), ids=WAITING.keys())
def test_an_operation_that_waits_for_the_device_is_found(operation: Callable[[Tensor], object]) -> None:
    with torch.inference_mode(), HostWaits(), pytest.raises(HostWaitError, match="host wait"):
        operation(torch.arange(1.0, 7.0))


def test_indexing_by_numbers_and_writing_one_number_by_a_mask_does_not_wait() -> None:
    x, index = torch.arange(6.0), torch.tensor([1, 4])
    with torch.inference_mode(), HostWaits():
        x[index] = x[index] + 1
        x[x > 100] = 0.0
    assert x.tolist() == [0, 2, 2, 3, 5, 5]
