"""The fast forward computes what the modules of recent dense families compute, and what it reads from a module is guarded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.build import build_parts
from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error
from rollbook.inference.engines.embedded.paged.runner import packed_error
from rollbook.numerics.module_parts import UnsupportedModelError
from rollbook.numerics.recipe import Attention, Logits, ModelRecipe
from tests.models.families import FAMILIES, family

FAST = [
    "Llama 3",
    "Mistral with a window",
    "Ministral 3",
    "Qwen2.5",
    "Qwen3",
    "Gemma 2",
    "Gemma 3 (text)",
    "GLM 4",
    "Phi 3 and 4",
    "Granite 3",
    "OLMo 2",
    "OLMo 3",
    "SmolLM3",
    "EXAONE 4",
    "Seed-OSS",
    "ERNIE 4.5",
    "Hunyuan",
    "gpt-oss",
    "Qwen3-MoE",
    "Mixtral",
    "GLM 4.5 (MoE)",
    "MiniMax M2",
    "Qwen1.5-MoE",
    "Granite 3 MoE",
    "FlexOlmo",
]


def forward_of(name: str, *, max_model_len: int = 160) -> tuple[LlamaForward, Any]:
    module = next(one for one in FAMILIES if one.name == name).model().requires_grad_(False)
    return LlamaForward(module, max_model_len=max_model_len), module


@pytest.mark.parametrize("name", FAST)
def test_slots_and_blocks_have_the_logits_of_the_module(name: str) -> None:
    forward, module = forward_of(name)
    assert relative_error(forward, module) < 1e-5
    # Longer than the windows of these models.
    assert packed_error(forward, module, block_size=16) < 1e-5
    with forward.short_windows(module):
        assert relative_error(forward, module) < 1e-5


def changed(part: Any, **changes: Any) -> Any:
    return replace(part, **changes)


Change = Callable[[Attention, Attention], dict[str, Any]]
OPTIONS: Mapping[str, tuple[str, Change]] = {
    "window": ("Mistral with a window", lambda *_: {"window": None}),
    "cap of scores": ("Gemma 2", lambda *_: {"cap": None}),
    "scale of scores": ("Gemma 3 (text)", lambda *_: {"scale": 8**-0.5}),
    "no positions": ("SmolLM3", lambda _, first: {"rotary": first.rotary}),
    "a table for each kind of layer": ("Gemma 3 (text)", lambda _, first: {"rotary": first.rotary}),
    "norms of all heads": ("OLMo 2", lambda *_: {"norms": None}),
    "norms after the rotation": ("Hunyuan", lambda own, _: {"norms": changed(own.norms, is_after_rotation=False)}),
    "factor of queries": ("Ministral 3", lambda own, _: {"rotary": changed(own.rotary, query_scales_T=None)}),
    "sinks": ("gpt-oss", lambda *_: {"sinks_R": None}),
    "pairs": ("ERNIE 4.5", lambda own, _: {"rotary": changed(own.rotary, is_paired=False)}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_comparison_finds_a_wrong_option_of_a_layer(option: str) -> None:
    name, change = OPTIONS[option]
    forward, module = forward_of(name)
    with forward.short_windows(module):
        first, second = forward._layers
        assert first.attention is not None
        assert second.attention is not None
        wrong = replace(second.attention, **change(second.attention, first.attention))
        forward._layers = [first, replace(second, attention=wrong)]
        assert packed_error(forward, module, block_size=16) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma 3 (text)", {"embedding_scale": 1.0}),
        ("Granite 3", {"embedding_scale": 1.0}),
        ("Granite 3", {"residual_scale": 1.0}),
        ("Granite 3", {"logits": Logits()}),
        ("Gemma 2", {"logits": Logits()}),
    ],
)
def test_the_comparison_finds_a_wrong_factor(name: str, changes: dict[str, Any]) -> None:
    forward, module = forward_of(name)
    forward.recipe = replace(forward.recipe, **changes)
    assert relative_error(forward, module) > 1e-3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("olmo_hybrid", "its gated delta part has other parts: a_proj, b_proj"),
        ("mimo_v2_flash", "its layers have different numbers of heads"),
        ("afmoe", "its layers has other parts: pre_mlp_layernorm"),
        ("gemma4_text", "its model has other parts: embed_tokens_per_layer"),
        ("starcoder2", "its norms are of type LayerNorm"),
        ("deepseek_v3", "DeepseekV3Attention has no q_proj, k_proj, v_proj"),
        ("mamba2", "it is not built like a Llama"),
    ],
)
def test_a_model_with_other_parts_is_refused_with_the_reason(kind: str, reason: str) -> None:
    module = family(kind).model()
    before = {name: weight.data_ptr() for name, weight in module.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=reason):
        LlamaForward(module, max_model_len=160)
    assert {name: weight.data_ptr() for name, weight in module.named_parameters()} == before


def attention_of(kind: str, *, max_model_len: int = 160, dtype: torch.dtype = torch.bfloat16) -> list[Attention]:
    module = family(kind).model().to(dtype)
    caches = DynamicCache(config=module.config.get_text_config()).layers
    recipe = ModelRecipe.of(module, max_model_len=max_model_len, caches=caches)
    return [attention for attention in recipe.attention if attention is not None]


@pytest.mark.parametrize(
    ("kind", "is_paired", "width", "dtype"),
    [
        ("llama", False, 8, torch.bfloat16),
        ("glm4", True, 4, torch.bfloat16),
        ("ernie4_5", True, 8, torch.float32),
        ("olmo2", False, 8, torch.float32),
    ],
)
def test_the_roundings_of_a_rotation_are_read_from_its_function(
    kind: str, is_paired: bool, width: int, dtype: torch.dtype
) -> None:
    rotary = attention_of(kind)[0].rotary
    assert rotary is not None
    assert (rotary.is_paired, rotary.width, rotary.cosines_TF.dtype) == (is_paired, width, dtype)


def test_a_rotation_that_depends_on_the_length_is_refused_above_the_original_length() -> None:
    assert attention_of("phi3", max_model_len=256)[0].rotary is not None
    with pytest.raises(UnsupportedModelError, match=r"\(longrope\) depends on the length above 256 tokens"):
        attention_of("phi3", max_model_len=257)


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    assert [layer.window for layer in attention_of("gemma3_text")] == [8, None]
    assert [layer.window for layer in attention_of("gemma3_text", max_model_len=8)] == [None, None]


def test_a_model_that_the_forward_computes_differently_runs_through_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logits, "of", lambda _: Logits())
    family("granite").model().save_pretrained(tmp_path)
    parts = build_parts(InferenceConfig(max_running=2, max_model_len=64, kv_memory_mb=5), tmp_path)
    assert parts.choices[0].startswith(
        "forward: Hugging Face module, because the llama forward has a relative error of"
    )
