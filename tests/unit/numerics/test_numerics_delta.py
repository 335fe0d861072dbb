"""Gated delta layers compute what their modules compute, in pieces, in steps and in batches of rows of different lengths."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error
from rollbook.numerics.delta import CHUNK, DeltaLayer
from rollbook.numerics.module_parts import DELTA_PARTS, GROUPED_DELTA_PARTS, UnsupportedModelError
from rollbook.numerics.recipe import ModelRecipe
from tests.models.families import family

HIDDEN = 12
CLASSES: dict[bool, tuple[Any, Any]] = {
    False: (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
    True: (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
}


def module_of(shape: dict[str, int], *, is_grouped: bool) -> Any:
    config, layer = CLASSES[is_grouped]
    torch.manual_seed(0)
    module = layer(config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], **shape), 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module.requires_grad_(False).eval()


def fused(module: Any, x_NTE: Tensor) -> Tensor:
    names = GROUPED_DELTA_PARTS if hasattr(module, GROUPED_DELTA_PARTS[0]) else DELTA_PARTS
    return torch.cat([getattr(module, name)(x_NTE) for name in names], dim=-1)


def states_of(layer: DeltaLayer, rows: int) -> list[Tensor]:
    return [torch.zeros(rows, *size) for size in layer.state_sizes]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    heads = draw(st.integers(1, 3))
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(2, 9)),
        "linear_value_head_dim": draw(st.integers(2, 9)),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
    }


@given(
    shape=shapes(),
    is_grouped=st.booleans(),
    pieces=st.lists(st.lists(st.integers(0, CHUNK + 9), min_size=3, max_size=3), min_size=1, max_size=3),
    steps=st.integers(0, 4),
)
@settings(max_examples=8, deadline=None)
def test_pieces_of_rows_of_different_lengths_and_steps_give_the_results_of_the_module(
    shape: dict[str, int], is_grouped: bool, pieces: list[list[int]], steps: int
) -> None:
    module = module_of(shape, is_grouped=is_grouped)
    layer = DeltaLayer.of(module)
    ends = [[1 + sum(of_row[: count + 1]) for count in range(len(of_row))] for of_row in pieces]
    rows = len(pieces)
    x_NTE = torch.randn(rows, max(of_row[-1] for of_row in ends) + steps, HIDDEN)
    expected_NTE = module(x_NTE)
    found = torch.full_like(expected_NTE, float("nan"))
    held = states_of(layer, rows)
    for start, end in pairwise([[0] * rows, *zip(*ends, strict=True)]):
        lengths = [last - first for first, last in zip(start, end, strict=True)]
        # Padding may be any finite number.
        piece_NTE = torch.full((rows, max(*lengths, 1), HIDDEN), 1e3)
        for row, length in enumerate(lengths):
            piece_NTE[row, :length] = x_NTE[row, start[row] : end[row]]
        result, *held = layer.chunked(fused(module, piece_NTE), held[0], held[1], torch.tensor(lengths))
        for row, length in enumerate(lengths):
            found[row, start[row] : end[row]] = module.out_proj(result[row, :length])
    at = torch.tensor([of_row[-1] for of_row in ends])
    everyone = torch.arange(rows)
    for _ in range(steps):
        result = layer.step(fused(module, x_NTE[everyone, at]), held[0], held[1], torch.ones(rows, dtype=torch.bool))
        found[everyone, at] = module.out_proj(result)
        at += 1
    for row in range(rows):
        torch.testing.assert_close(found[row, : at[row]], expected_NTE[row, : at[row]], rtol=1e-4, atol=1e-4)


def test_a_step_does_not_change_a_bit_of_rows_that_are_not_added_to() -> None:
    module = family("qwen3_next").model().requires_grad_(False).model.layers[0].linear_attn
    layer = DeltaLayer.of(module)
    held = [torch.randn_like(part) for part in states_of(layer, 3)]
    before = [part.clone() for part in held]
    layer.step(fused(module, torch.randn(3, 32)), held[0], held[1], torch.tensor([False, True, False]))
    for part, old in zip(held, before, strict=True):
        assert torch.equal(part[::2], old[::2])
        assert not torch.equal(part[1], old[1])


def test_long_decays_do_not_overflow() -> None:
    module = module_of(
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
        is_grouped=False,
    )
    module.A_log.fill_(4.0)
    x_1TE = 5 * torch.randn(1, 3 * CHUNK, HIDDEN)
    layer = DeltaLayer.of(module)
    inputs, state = states_of(layer, 1)
    result, _, _ = layer.chunked(fused(module, x_1TE), inputs, state, torch.tensor([3 * CHUNK]))
    torch.testing.assert_close(module.out_proj(result), module(x_1TE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_forward_of_a_model_with_such_layers_has_the_logits_of_the_module(kind: str) -> None:
    module = family(kind).model().requires_grad_(False)
    forward = LlamaForward(module, max_model_len=160)
    assert relative_error(forward, module) < 1e-5
    assert [attention is not None and attention.is_gated for attention in forward.recipe.attention] == [False, True]
    assert forward.recipe.inexact_because is not None


def test_the_comparison_finds_a_wrong_part_of_the_state() -> None:
    module = family("qwen3_5_text").model().requires_grad_(False)
    forward = LlamaForward(module, max_model_len=160)
    steps = forward.decode

    def forgetful(*args: Any, **options: Any) -> Tensor:
        args[2].states.layers[0][0].zero_()
        return steps(*args, **options)

    forward.decode = forgetful  # type: ignore[method-assign]
    assert relative_error(forward, module) > 1e-3


def test_other_recurrent_layers_are_refused_with_the_reason() -> None:
    module = family("olmo_hybrid").model()
    caches = DynamicCache(config=module.config).layers
    with pytest.raises(UnsupportedModelError, match="its gated delta part has other parts: a_proj, b_proj"):
        ModelRecipe.of(module, max_model_len=64, caches=caches)
