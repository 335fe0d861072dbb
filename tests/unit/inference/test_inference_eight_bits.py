"""With 8 bits for keys and values, or for products, logprobs are those of a forward that rounds the same, whatever a row goes
through."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded import build
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from tests.parts.inference.engines import TinyModel, embedded, some_prompts, until
from tests.parts.inference.models import build_model, plain_logprobs

SETTINGS: dict[str, Any] = {"kv_dtype": "int8", "exactness": "fast", "max_running": 8, "kv_memory_mb": 8.0}
FP8_WEIGHTS: dict[str, Any] = {"weights_dtype": "fp8", "exactness": "fast", "max_running": 8, "kv_memory_mb": 8.0}
FORMATS = eight_bits.FORMATS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eight-bits")


def read_back(vectors: Tensor, stored: torch.dtype) -> Tensor:
    return eight_bits.decoded(eight_bits.encoded(vectors, stored), vectors.dtype)


class RoundedCache(DynamicCache):  # type: ignore[misc]  # transformers leaves it untyped
    """The cache of transformers, with every vector as the engine reads it."""

    def __init__(self, stored: torch.dtype) -> None:
        super().__init__()
        self.stored = stored

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rounded = (read_back(vectors, self.stored) for vectors in (key_states, value_states))
        both: tuple[Tensor, Tensor] = super().update(*rounded, *args, **options)
        return both


def rounded_logprobs(model: Any, tokens: list[int], start: int, stored: torch.dtype) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), past_key_values=RoundedCache(stored)).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return [float(logprobs[at - 1, tokens[at]]) for at in range(start, len(tokens))]


def differences(
    model: Any, prompt: list[int], completion: Completion, *, stored: torch.dtype, start: int = 0
) -> np.ndarray[Any, Any]:
    tokens = [*prompt, *completion.token_ids.tolist()]
    expected = np.array(rounded_logprobs(model, tokens, len(prompt) + start, stored))
    found: np.ndarray[Any, Any] = np.abs(completion.logprobs[start:] - expected)
    return found


def assert_rounded_alike(
    model: Any, prompts: list[list[int]], completions: list[Completion], *, stored: torch.dtype
) -> None:
    pairs = zip(prompts, completions, strict=True)
    found = np.concatenate([differences(model, *both, stored=stored) for both in pairs])
    # A number in the middle between two others is rounded to either, by the order of the sums before it.
    assert np.quantile(found, 0.9) < 1e-3
    assert found.mean() < 5e-3


async def play(engine: TransformersEngine, prompts: list[list[int]], length: int = 30) -> list[Completion]:
    sampling = [SamplingParams(max_tokens=length, seed=seed) for seed in range(len(prompts))]
    return list(await asyncio.gather(*(engine.generate(*both) for both in zip(prompts, sampling, strict=True))))


async def update_in_flight(
    tiny: TinyModel, prompts: list[list[int]], **settings: Any
) -> tuple[list[Completion], list[int]]:
    """Completions that an update meets, and how many tokens of each are of the old weights."""
    async with embedded(tiny, kv_after_update="recompute", **settings) as engine:
        futures = [engine.submit(prompt, SamplingParams(max_tokens=60)) for prompt in prompts]
        await until(lambda: engine.stats().tokens > 20)
        await engine.load_weights(*tiny.weights(2))
        completions = await asyncio.gather(*futures)
    changed = [int((completion.versions == 1).sum()) for completion in completions]
    assert any(0 < count < 60 for count in changed)
    return list(completions), changed


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([*FORMATS.values()]),
)
def test_numbers_of_a_vector_keep_the_precision_of_the_format(
    numbers: list[float], dtype: torch.dtype, stored: torch.dtype
) -> None:
    vector = torch.tensor(numbers).to(dtype)
    read, largest = read_back(vector, stored), float(vector.abs().max())
    # Floats have three bits of fraction down to 2^-13 of the largest number, integers at least 64 steps up to it.
    error = vector.abs() / 16 + largest * 2.0**-17 if stored is eight_bits.FP8 else torch.tensor(largest / 64)
    assert bool(((read - vector).abs() <= error + 1e-35).all())
    assert not read[vector == 0].any()


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize(("kind", "kv_dtype"), [("llama", "int8"), ("qwen3", "fp8")])
async def test_logprobs_are_those_of_a_forward_with_rounded_keys_and_values(
    root: Path, kind: str, kv_dtype: str, is_captured: bool
) -> None:
    tiny, prompts = TinyModel(root=root, kind=kind), some_prompts(12, 4, 60)
    async with embedded(tiny, is_captured=is_captured, **SETTINGS | {"kv_dtype": kv_dtype}) as engine:
        assert any(choice.startswith(f"keys and values: {kv_dtype}") for choice in engine.parts.choices)
        first = await play(engine, prompts)
        # The next turns start with the keys and values of the first.
        turns = [[*p, *c.token_ids.tolist(), 5] for p, c in zip(prompts, first, strict=True)]
        second = await play(engine, turns)
        assert engine.stats().cached_tokens > 0
    model = tiny.model(1)
    assert_rounded_alike(model, prompts, first, stored=FORMATS[kv_dtype])
    assert_rounded_alike(model, turns, second, stored=FORMATS[kv_dtype])
    exact = [plain_logprobs(model, [*p, *c.token_ids.tolist()], len(p)) for p, c in zip(prompts, first, strict=True)]
    assert max(np.abs(c.logprobs - e).max() for c, e in zip(first, exact, strict=True)) > 0.01


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
async def test_preempted_rows_read_the_same_keys_and_values(root: Path, is_captured: bool) -> None:
    tiny, prompts = TinyModel(root=root), some_prompts(12, 40, 60)
    settings = SETTINGS | {"kv_memory_mb": 0.06, "max_model_len": 128, "prefix_cache_share": 0.0}
    async with embedded(tiny, is_captured=is_captured, **settings) as engine:
        completions = await play(engine, prompts, length=60)
        assert engine.parts.scheduler.preemptions > 0
    assert_rounded_alike(tiny.model(1), prompts, completions, stored=eight_bits.INT8)


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
async def test_after_recompute_keys_and_values_are_those_of_the_new_weights(root: Path, is_captured: bool) -> None:
    tiny, prompts = TinyModel(root=root), some_prompts(4, 20, 40)
    completions, changed = await update_in_flight(tiny, prompts, is_captured=is_captured, **SETTINGS)
    found = [
        differences(tiny.model(2), prompt, completion, stored=eight_bits.INT8, start=start)
        for prompt, completion, start in zip(prompts, completions, changed, strict=True)
    ]
    assert np.quantile(np.concatenate(found), 0.9) < 1e-3


async def test_the_same_memory_holds_more_blocks(root: Path) -> None:
    tiny, blocks = TinyModel(root=root), []
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_memory_mb": 0.2, "max_running": 1000, "exactness": "fast"}
    for kv_dtype in ("auto", "int8"):
        async with embedded(tiny, is_captured=True, kv_dtype=kv_dtype, **settings) as engine:
            assert isinstance(engine.parts.runner, PackedRunner)
            blocks.append(engine.parts.runner.cache.num_blocks)
    # Vectors of 8 numbers: 16 bytes, and 9.
    assert blocks[1] / blocks[0] == pytest.approx(16 / 9, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, 'exactness = "fast"'),
        ({"exactness": "fast", "forward": "module"}, 'forward = "auto"'),
        ({"exactness": "fast", "engine": "vllm"}, "vllm.args"),
        ({"exactness": "fast", "engine": "sglang"}, "engine is sglang"),
    ],
)
def test_settings_that_exclude_eight_bits_are_refused_with_a_remedy(settings: dict[str, Any], remedy: str) -> None:
    for one in ({"kv_dtype": "int8"}, {"weights_dtype": "fp8"}):
        with pytest.raises(ValidationError, match=remedy):
            InferenceConfig.model_validate(one | settings)


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("gpt2", SETTINGS, 'kv_dtype = "int8" cannot be used: .*fast forward'),
        ("qwen3_5_text", SETTINGS, 'kv_dtype = "int8" cannot be used: .*recurrent'),
        ("gpt2", FP8_WEIGHTS, 'weights_dtype = "fp8" cannot be used: .*fast forward'),
        ("qwen3_5_text", FP8_WEIGHTS, 'weights_dtype = "fp8" cannot be used: .*attention in all layers'),
        ("qwen3_moe", FP8_WEIGHTS, 'weights_dtype = "fp8" cannot be used: .*no experts'),
    ],
)
async def test_models_without_the_path_are_refused_with_the_reason(
    root: Path, kind: str, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunError, match=rf'{reason}.* Set it to "auto"'):
        async with embedded(TinyModel(root=root, kind=kind), **given):
            pass


def test_gpus_without_fp8_are_refused_by_name_and_int8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_model()
    model = LlamaForward(module, max_model_len=64)
    model.device = torch.device("cuda", 0)
    names = SimpleNamespace(get_device_capability=lambda _: (8, 0), get_device_name=lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch, "cuda", names)
    with pytest.raises(RunError, match=r'"fp8" cannot be used: NVIDIA A100 .* 8\.9; "int8" needs none'):
        build.store_eight_bits(model, module, [], kv_dtype="fp8")
    with pytest.raises(RunError, match=r'weights_dtype = "fp8" cannot be used: NVIDIA A100 .* 8\.9'):
        build.use_fp8_weights(model, module, [])


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_model_whose_logits_change_too_much_is_refused(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_model()
    monkeypatch.setattr(build, "EIGHT_BITS_TOLERANCE", 1e-3)
    monkeypatch.setattr(build, "FP8_WEIGHTS_TOLERANCE", 1e-3)
    with pytest.raises(RunError, match=r"the logits of this model have a relative error of 0\.\d+"):
        build.store_eight_bits(LlamaForward(module, max_model_len=64), module, [], kv_dtype=kv_dtype)
    with pytest.raises(RunError, match=r"the logits of this model have a relative error of 0\.\d+"):
        build.use_fp8_weights(LlamaForward(module, max_model_len=64), module, [])


def test_sizes_that_fp8_products_do_not_support_are_named() -> None:
    weights = [torch.zeros(16, 40), torch.zeros(8, 32)]
    assert eight_bits.why_no_products(torch.device("cpu"), torch.float32, weights) == (
        "sizes of its projections are no multiples of 16: 8, 40"
    )
    assert (
        eight_bits.why_no_products(torch.device("cuda"), torch.float32, [])
        == "it needs bfloat16 (inference.dtype) on a GPU"
    )


def rounded_lines(x: Tensor) -> Tensor:
    numbers, scales = eight_bits.scaled_lines(x.flatten(0, -2))
    return (numbers.float() * scales).view(x.shape)


class RoundedLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded_lines(layer.weight), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded_lines(x), self.weight, self.bias)


def rounded_model(model: Any) -> Any:
    """The module, with every projection of its layers as the engine computes it."""
    with torch.no_grad():
        for name, layer in list(model.model.layers.named_modules()):
            if isinstance(layer, nn.Linear):
                owner, _, last = name.rpartition(".")
                setattr(model.model.layers.get_submodule(owner), last, RoundedLinear(layer))
    return model


def assert_products_rounded_alike(
    model: Any, prompts: list[list[int]], completions: list[Completion], starts: list[int] | None = None
) -> None:
    rounded, found = rounded_model(model), []
    for prompt, one, start in zip(prompts, completions, starts or [0] * len(prompts), strict=True):
        expected = plain_logprobs(rounded, [*prompt, *one.token_ids.tolist()], len(prompt) + start)
        found.append(np.abs(one.logprobs[start:] - expected))
    # As above: a number in the middle between two others.
    assert np.quantile(np.concatenate(found), 0.75) < 1e-3
    assert np.concatenate(found).mean() < 2e-2


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
async def test_with_fp8_weights_logprobs_are_those_of_a_module_that_rounds_its_products(
    root: Path, kind: str, is_captured: bool
) -> None:
    tiny, prompts = TinyModel(root=root, kind=kind), some_prompts(12, 4, 60)
    async with embedded(tiny, is_captured=is_captured, **FP8_WEIGHTS) as engine:
        assert any(choice.startswith("weights of projections: fp8") for choice in engine.parts.choices)
        first = await play(engine, prompts)
        turns = [[*p, *c.token_ids.tolist(), 5] for p, c in zip(prompts, first, strict=True)]
        second = await play(engine, turns)
        assert engine.parts.weights.digest() == tiny.weights(1)[0].digest
    assert_products_rounded_alike(tiny.model(1), prompts, first)
    assert_products_rounded_alike(tiny.model(1), turns, second)
    exact = [
        plain_logprobs(tiny.model(1), [*p, *c.token_ids.tolist()], len(p)) for p, c in zip(prompts, first, strict=True)
    ]
    assert max(np.abs(c.logprobs - e).max() for c, e in zip(first, exact, strict=True)) > 0.01


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
async def test_fp8_weights_are_copied_again_at_an_update(root: Path, is_captured: bool) -> None:
    tiny, prompts = TinyModel(root=root), some_prompts(4, 20, 40)
    completions, changed = await update_in_flight(tiny, prompts, is_captured=is_captured, **FP8_WEIGHTS)
    assert_products_rounded_alike(tiny.model(2), prompts, completions, changed)
