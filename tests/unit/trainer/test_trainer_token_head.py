"""Logprobs in chunks: exact values and gradients, without a tensor of the logits of all tokens."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.numerics.recipe import Logits
from rollbook.trainer.model import token_head as token_head_module
from rollbook.trainer.model.token_head import token_head

N, H, V = 37, 8, 50


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    temperatures = torch.rand(N, generator=generator) + 0.5
    return hidden, weight, bias, targets, temperatures


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_values_and_gradients_equal_those_of_full_logits(
    rows: int, has_bias: bool, scale: float, cap: float | None
) -> None:
    hidden, weight, bias_, targets, temperatures = random_inputs(torch.float32)
    bias = bias_ if has_bias else None
    arguments = [hidden, weight, *([bias_] if has_bias else [])]
    found = token_head(
        hidden,
        weight,
        bias,
        targets,
        temperatures,
        max_bytes=4 * V * rows,
        is_entropy_trained=True,
        logits=Logits(scale=scale, cap=cap),
    )
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    table = torch.log_softmax(logits / temperatures[:, None], -1)
    expected = (table[torch.arange(N), targets], -(table.exp() * table).sum(-1))
    weights = torch.linspace(-1, 1, N)
    for value, expected_value in zip(found, expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((found[0] * weights + 0.3 * found[1]).sum(), arguments)
    expected_gradients = torch.autograd.grad((expected[0] * weights + 0.3 * expected[1]).sum(), arguments)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_several_targets_of_a_token_have_the_values_and_gradients_of_full_logits(rows: int) -> None:
    hidden, weight, _, targets, temperatures = random_inputs(torch.float32)
    more = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(n))[:4] for n in range(N)])
    more[0, 2] = targets[0]
    both = torch.cat([targets[:, None], more], 1)
    found, _ = token_head(hidden, weight, None, both, temperatures, max_bytes=4 * V * rows, is_entropy_trained=False)
    table = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1)
    expected = table.gather(-1, both)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, N * 5).view(N, 5)
    gradients, wanted = (torch.autograd.grad((one * weights).sum(), [hidden, weight]) for one in (found, expected))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)


def test_entropy_and_frozen_weights_get_no_gradient_unless_trained() -> None:
    hidden, weight, _, targets, temperatures = random_inputs(torch.float32)
    frozen = weight.detach()
    logprobs, entropy = token_head(
        hidden, frozen, None, targets, temperatures, max_bytes=1 << 20, is_entropy_trained=False
    )
    assert not entropy.requires_grad
    logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert hidden.grad is not None
    assert frozen.grad is None


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the size of the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own signature
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("rows", [5, 16])
def test_no_tensor_holds_the_logits_of_more_than_one_chunk(rows: int) -> None:
    hidden, weight, _, targets, temperatures = random_inputs(torch.float32)
    with LargestTensor() as largest:
        logprobs, entropy = token_head(
            hidden, weight, None, targets, temperatures, max_bytes=4 * V * rows, is_entropy_trained=True
        )
        (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert largest.elements == max(rows * V, V * H, N * H)
    assert largest.elements < N * V


def test_one_compilation_serves_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a compilation takes seconds, and each batch has another number of tokens."""
    compiled: list[str] = []

    @cache
    def counted(function: Callable[..., Any], *, is_cuda: bool) -> Any:
        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            compiled.append(function.__name__)
            return graph.forward

        return torch.compile(function, dynamic=True, backend=backend)

    monkeypatch.setattr(token_head_module, "_for_device", counted)
    hidden, weight, _, targets, _ = random_inputs(torch.float32)
    for count in (4, 12, 37, 36, 26, 9):  # with 12 rows a chunk: less than one, one, three and one token, three, ...
        logprobs, _ = token_head(
            hidden[:count], weight, None, targets[:count], None, max_bytes=4 * V * 12, is_entropy_trained=False
        )
        logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert compiled == ["_chunk_values", "_chunk_grad"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logprobs_of_bfloat16_inputs_on_a_gpu_are_not_rounded_with_the_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = (8 * torch.randn(64, 64, generator=generator)).to("cuda", torch.bfloat16)
    weight = torch.randn(1000, 64, generator=generator).to("cuda", torch.bfloat16)
    targets = torch.randint(0, 1000, (64,), generator=generator).to("cuda")
    found, _ = token_head(hidden, weight, None, targets, None, max_bytes=1 << 20, is_entropy_trained=False)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(-1, targets[:, None])[:, 0]
    # Logits are about 200 here: rounded to bfloat16 they would be off by up to 0.5.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-2)
