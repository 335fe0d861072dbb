"""The operations that sampler and trainer share compute what torch computes.

Their kernels need a GPU, or Triton's interpreter: `make test-kernels`. That their bits are equal is measured on a GPU by
`benchmarks.engine.exactness`.
"""

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.numerics import operations
from rollbook.numerics.gradients import Operation, with_torch_gradient
from rollbook.numerics.module_parts import ACTIVATIONS, Activation
from rollbook.numerics.recipe import Norm
from rollbook.trainer.data.prefixes import PackedSequences, prefix_tree
from rollbook.trainer.model.network import logits_of, make_exact, why_not_exact
from rollbook.trainer.model.packed_attention import Packing
from tests.models.families import family

CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    operations.kernels_missing is not None or not CAN_RUN,
    reason=operations.kernels_missing or "no GPU, and TRITON_INTERPRET is not 1",
)
# The interpreter computes with numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SEQUENCES = {
    "separate": PackedSequences.unshared([70, 33, 1]),
    "shared prompts": prefix_tree([70, 61, 33], [0, 40, 20])[0],
}


@needs_kernels
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("chunk", [1024, 64], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("window", [None, 5, 66])
@torch.no_grad()
def test_attention_over_packed_sequences(
    name: str, chunk: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CHUNK", chunk)
    monkeypatch.setattr(operations, "TILE_LINES", 32)
    sequences = SEQUENCES[name]
    count = sequences.num_computed
    query, key, value = random(count, 6, 16), random(count, 2, 16, seed=1), random(count, 2, 16, seed=2)
    ours, expected = (
        Packing.of(sequences, DEVICE, kernel=kernel).kernel(query, key, value, None, window)
        for kernel in ("exact", "equal")
    )
    assert_close(ours, expected)


def assert_same_function(ours: Operation, expected: Operation, *inputs: Tensor) -> None:
    """The same values and gradients."""
    results = []
    for operation in (ours, expected):
        tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        value = operation(*tensors)
        results.append([value, *torch.autograd.grad((value * random(*value.shape, seed=9)).sum(), tensors)])
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted)


@needs_kernels
@pytest.mark.parametrize(("adds_one", "rounds_once"), [(False, False), (False, True), (True, True)])
def test_norms(adds_one: bool, rounds_once: bool) -> None:
    assert_same_function(
        lambda x, weight: operations.rms_norm(x, Norm(weight, 1e-5, adds_one, rounds_once)),
        lambda x, weight: F.rms_norm(x, (48,), weight + adds_one, 1e-5),
        random(2, 25, 48),
        random(48, seed=1),
    )


@needs_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: Activation) -> None:
    gates, ups = random(2, 5, 300), random(2, 5, 300, seed=1)
    assert_same_function(
        lambda gates, ups: operations.gate(gates, ups, activation),
        lambda gates, ups: ACTIVATIONS[activation](gates) * ups,
        gates,
        ups,
    )


def restored_family(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the model's layers, whose rotation is put back after the test."""
    modeling: Any = sys.modules[type(model.model.layers[0].self_attn).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)
    return modeling


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "phi3", "olmo2"])
def test_rotations_in_one_kernel_have_the_bits_of_the_module(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(kind).model().to(DEVICE)
    modeling = restored_family(model, monkeypatch)
    plain = modeling.apply_rotary_pos_emb
    make_exact(model)
    assert modeling.apply_rotary_pos_emb is not plain
    positions_1M, size = torch.arange(7, 30, device=DEVICE)[None], model.model.layers[0].self_attn.head_dim
    # The interpreter does not round bfloat16 as a GPU does.
    for dtype in (torch.float32, torch.float16):
        query, key = (random(1, 23, heads, size, seed=heads).to(dtype).transpose(1, 2) for heads in (6, 3))
        tables = model.model.rotary_emb(query, positions_1M)
        results = []
        for rotate in (plain, modeling.apply_rotary_pos_emb):
            heads = [tensor.clone().requires_grad_() for tensor in (query, key)]
            turned = rotate(*heads, *tables)
            weights = [random(*tensor.shape, seed=9).to(dtype) for tensor in turned]
            results.append((turned, torch.autograd.grad(turned, heads, weights)))
        (expected, gradients), (found, own_gradients) = results
        assert all(map(torch.equal, found, expected))
        for own, gradient in zip(own_gradients, gradients, strict=True):
            torch.testing.assert_close(own, gradient, rtol=1e-3, atol=1e-2)


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4", "olmo2", "gemma3_text"])
def test_a_model_with_the_operations_of_the_sampler_computes_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(kind).model().to(DEVICE)
    restored_family(model, monkeypatch)
    ids = torch.arange(3, 15, device=DEVICE).view(1, -1)
    results = []
    for is_exact in (False, True):
        if is_exact:
            make_exact(model)
        logits = model(input_ids=ids, use_cache=False).logits
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted)


def test_models_that_the_fast_forward_does_not_support_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "why_not_here", lambda: None)
    reasons = {
        kind: why_not_exact(model, logits=logits_of(model))
        for kind in ("llama", "olmo3", "granite", "qwen3_moe", "starcoder2")
        for model in (family(kind).model(),)
    }
    assert reasons["llama"] is reasons["olmo3"] is reasons["granite"] is None
    assert reasons["qwen3_moe"] == "grouped products of experts have no fixed order of sums"
    assert "its norms are of type LayerNorm" in (reasons["starcoder2"] or "")


@needs_kernels
@pytest.mark.parametrize("rows", [3, 40])
def test_deep_products_of_few_rows(rows: int) -> None:
    x, weight = random(rows, 300), random(24, 300, seed=1)
    assert_close(operations.product(x, weight.t()), x @ weight.t())


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_normalisers(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.numerics.triton_logprobs.TILE", 64)
    logits, targets = random(5, 200) * 4, torch.arange(5, device=DEVICE) * 37
    temperatures = torch.full((5,), temperature, device=DEVICE)
    logprobs, entropies, normalisers = operations.token_logprobs(logits, targets, temperatures)
    expected = torch.log_softmax(logits / temperature, dim=-1)
    assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    assert_close(entropies, -(expected.exp() * expected).sum(dim=-1))
    assert_close(normalisers, torch.logsumexp(logits / temperature, dim=-1))


def test_the_value_is_that_of_one_function_and_the_gradient_that_of_the_other() -> None:
    x, y = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(2))
    value = with_torch_gradient(lambda x, y: x * y + 100.0, lambda x, y: x * y, x, y.detach())
    value.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert value.tolist() == [104.0, 109.0]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]
    assert y.grad is None


def test_nothing_is_kept_for_a_gradient_that_nobody_needs() -> None:
    assert with_torch_gradient(torch.neg, torch.abs, torch.ones(2)).grad_fn is None


def test_a_build_of_torch_that_cannot_forbid_split_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None = None) -> None:
        if name is not None:
            raise RuntimeError(f"no {name}")

    monkeypatch.setattr(operations, "kernels_missing", None)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", refuse)
    operations.why_not_here.cache_clear()
    try:
        assert operations.why_not_here() == f"PyTorch {torch.__version__} cannot forbid split products: no cublaslt"
    finally:
        operations.why_not_here.cache_clear()


def test_the_rules_for_products_are_restored_after_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["cublas"]

    def prefer(name: str | None = None) -> str:
        chosen[-1] = name or chosen[-1]
        return chosen[-1]

    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    names = [
        f"allow_{kind}_reduced_precision_reduction{part}" for kind in ("bf16", "fp16") for part in ("", "_split_k")
    ]
    matmul.allow_bf16_reduced_precision_reduction = (False, True)
    try:
        before = [getattr(matmul, name) for name in names]
        with operations.unsplit_products():
            with operations.unsplit_products():
                pass
            assert [getattr(matmul, name) for name in names] == [False] * 4
            assert chosen[-1] == "cublaslt"
        assert [getattr(matmul, name) for name in names] == before == [False, True, True, True]
        assert chosen[-1] == "cublas"
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True


def test_the_order_of_gradients_is_fixed_for_them_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    seen = []

    class Recording(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append(modes())
            return gradient

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        x = torch.ones(2, requires_grad=True)
        with_torch_gradient(torch.clone, Recording.apply, x).sum().backward()  # type: ignore[no-untyped-call]
        assert seen == [(True, False)]
        assert modes() == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_tile_holds_as_many_tokens_as_heads_allow() -> None:
    assert operations.tokens_per_tile(heads=9, key_heads=3, size=64) == 42
    assert operations.tokens_per_tile(heads=9, key_heads=3, size=256) == 21
    assert operations.tokens_per_tile(heads=512, key_heads=1, size=64) == 1
