"""A mixture of experts computes what its module computes, whatever the other tokens are, and other formulas are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from rollbook.numerics.experts import Experts, grouped_product
from rollbook.numerics.module_parts import UnsupportedModelError
from rollbook.numerics.recipe import ModelRecipe, feed_forward_of
from tests.models.families import family


def mixture(kind: str) -> tuple[Experts, Any]:
    block = feed_forward_of(family(kind).model().requires_grad_(False).model.layers[1])[1]
    return Experts.of(block), block


def recipe_of(module: Any) -> ModelRecipe:
    return ModelRecipe.of(module, max_model_len=64, caches=DynamicCache(config=module.config.get_text_config()).layers)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_a_token_has_the_result_it_has_alone(kind: str) -> None:
    experts, block = mixture(kind)
    x_ME = random(40, 32)
    together = experts(x_ME, *experts.routed(x_ME))
    alone = torch.cat([experts(x[None], *experts.routed(x[None])) for x in x_ME])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    expected = block(x_ME[None])
    expected_ME = (expected[0] if isinstance(expected, tuple) else expected).view(x_ME.shape)
    torch.testing.assert_close(together, expected_ME, rtol=1e-5, atol=1e-6)
    # Padding may hold anything.
    x_ME[::2] = float("nan")
    others = experts(x_ME, *experts.routed(x_ME))
    torch.testing.assert_close(others[1::2], alone[1::2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ends", [[3, 3, 8, 10], [0, 0, 0, 10], [0, 10, 10, 10]])
def test_the_product_of_a_cpu_is_that_of_the_operation_for_gpus(ends: list[int]) -> None:
    x_PI, weight_XIO, ends_X = random(10, 32), random(4, 48, 32).transpose(1, 2), torch.tensor(ends, dtype=torch.int32)
    torch.testing.assert_close(
        grouped_product(x_PI, weight_XIO, ends_X), F.grouped_mm(x_PI, weight_XIO, offs=ends_X), rtol=1e-5, atol=1e-5
    )


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Refuses operations whose result the host must know before it can continue: they cannot be captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        is_mask = function is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        if is_mask or function in {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}:
            raise AssertionError(f"the host waits for {function}")
        return function(*args, **(kwargs or {}))


MIXTURES = ["gpt_oss", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "granitemoe", "hunyuan_v1_moe"]


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_and_experts_can_be_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, _ = mixture(kind)
    x_ME = random(6, 32)
    expected_ME = experts(x_ME, *experts.routed(x_ME))
    # As on a GPU.
    monkeypatch.setattr(
        "rollbook.numerics.experts.grouped_product", lambda x, weight, ends: F.grouped_mm(x, weight, offs=ends)
    )
    with Waits():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        found_ME = experts(x_ME, *experts.routed(x_ME))
        with pytest.raises(AssertionError, match="the host waits"):
            x_ME[x_ME > 0]
    torch.testing.assert_close(found_ME, expected_ME, rtol=1e-5, atol=1e-5)


def doubled(block: Any) -> None:
    forward = block.forward
    block.forward = lambda x: 2 * forward(x)


def with_another_router(block: Any) -> None:
    block.gate.forward = lambda hidden, temperature: None


def with_a_parameter(block: Any) -> None:
    block.experts.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (doubled, "its mixtures of experts have the formula of Qwen3MoeSparseMoeBlock"),
        (with_another_router, "its routers of type Qwen3MoeTopKRouter need other inputs"),
        (with_a_parameter, "its experts have the parts down_proj, gate_up_proj, scale"),
    ],
)
def test_another_mixture_is_refused_with_the_reason(change: Callable[[Any], None], reason: str) -> None:
    module = family("qwen3_moe").model()
    for layer in module.model.layers:
        change(layer.mlp)
    with pytest.raises(UnsupportedModelError, match=reason):
        recipe_of(module)


def test_a_mixture_is_not_exact_and_says_why() -> None:
    recipe = recipe_of(family("gpt_oss").model())
    assert recipe.inexact_because == "grouped products of experts have no fixed order of sums"
    assert recipe_of(family("llama").model()).inexact_because is None
