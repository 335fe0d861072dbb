"""Decode steps of Hugging Face modules compute attention and norms with kernels of their own, and leave the module as it was.

Kernels need a GPU, or Triton's interpreter: `make test-kernels`.
"""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollbook.inference.engines.embedded.build import use_step_kernels
from rollbook.inference.engines.embedded.model import module_kernels
from rollbook.inference.engines.embedded.model.llama import relative_error
from rollbook.inference.engines.embedded.model.module import ModuleForward, StateForward
from rollbook.inference.engines.embedded.model.module_kernels import StepKernels, one_query_attention, why_not_replaced
from rollbook.numerics.operations import kernels_missing
from tests.models.families import family

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    kernels_missing is not None or not CAN_RUN, reason=kernels_missing or "no GPU, and TRITON_INTERPRET is not 1"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter computes with numpy.

SHAPES = {
    "groups of three": (3, 3, 64, 64),
    "groups of six": (2, 6, 16, 16),
    "sizes that are no powers of two": (2, 2, 80, 80),
    "values of another size": (2, 1, 24, 40),
}
"""Key heads, query heads of each, key size, value size."""
MASKS = ["none", "additive", "smallest numbers", "biases", "boolean", "one for all rows"]


class Layer(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(shape: tuple[int, int, int, int], length: int, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as a projection gives them, and keys and values as views of larger memories."""
    keys, group, size, value_size = shape
    query = random(rows, 1, keys * group, size).transpose(1, 2)
    memory = random(rows + 2, keys, length + 9, size, seed=1), random(rows + 2, keys, length + 9, value_size, seed=2)
    return query, memory[0][:rows, :, :length], memory[1][:rows, :, :length]


def visible(length: int, rows: int = 3) -> Tensor:
    """All of them, the first five, and the last three, so whole blocks are hidden at either end."""
    at_T = torch.arange(length, device=DEVICE)
    return torch.stack([at_T >= 0, at_T < 5, at_T >= length - 3])[:rows, None, None]


def mask_of(kind: str, length: int) -> Tensor | None:
    seen = visible(length)
    if kind == "none":
        return None
    if kind == "boolean":
        return seen
    if kind == "one for all rows":
        return seen[1:2]
    if kind == "biases":
        return torch.where(seen, random(3, 1, 1, length, seed=3), float("-inf"))
    hidden = float("-inf") if kind == "additive" else torch.finfo(torch.float32).min
    return torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, hidden)


def expected_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(groups, 1).transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    return (scores.softmax(-1) @ value.float().repeat_interleave(groups, 1)).transpose(1, 2)


@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run in the interpreter, too."""
    monkeypatch.setattr(module_kernels, "DEVICE", DEVICE)


@pytest.fixture
def no_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the attention of transformers was called")

    monkeypatch.setattr(module_kernels, "sdpa_attention_forward", refuse)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.numerics.triton_one_query.LEAST_KEYS", 64)
    monkeypatch.setattr("rollbook.numerics.triton_one_query.SCAN", 64)


@needs_kernels
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("length", [7, 200])
@pytest.mark.usefixtures("on_this_device", "no_sdpa", "small_parts")
def test_one_query_attends_as_in_plain_float32(shape: tuple[int, int, int, int], kind: str, length: int) -> None:
    query, key, value = inputs(shape, length)
    mask = mask_of(kind, length)
    found, _ = one_query_attention(Layer(shape[1]), query, key, value, mask, scaling=0.3, position_ids=query)
    assert found.shape == (3, 1, shape[0] * shape[1], shape[3])
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected_of(query, key, value, mask, 0.3), rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.usefixtures("on_this_device", "no_sdpa", "small_parts")
def test_hidden_positions_are_not_read(length: int) -> None:
    query, key, value = inputs((2, 2, 16, 16), length)
    mask = mask_of("boolean", length)
    assert mask is not None
    expected = expected_of(query, key, value, mask, 0.25)
    for memory in (key, value):
        memory.masked_fill_(~mask[:, :, 0, :, None], float("nan"))
    found, _ = one_query_attention(Layer(2), query, key, value, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.usefixtures("on_this_device", "no_sdpa", "small_parts")
def test_a_row_without_visible_positions_gets_zeros(length: int) -> None:
    query, key, value = inputs((2, 2, 16, 16), length)
    mask = visible(length)
    mask[1] = False
    found, _ = one_query_attention(Layer(2), query, key, value, mask)
    assert (found[1] == 0).all()
    assert found.isfinite().all()


@needs_kernels
@pytest.mark.usefixtures("on_this_device", "no_sdpa", "small_parts")
def test_half_precision_is_rounded_once() -> None:
    query, key, value = (tensor.half() for tensor in inputs((3, 3, 64, 64), 200))
    mask = visible(200)
    found, _ = one_query_attention(Layer(3), query, key, value, mask)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected_of(query, key, value, mask, 0.125), rtol=2e-3, atol=2e-3)


@needs_kernels
def test_rows_are_split_until_the_device_is_busy() -> None:
    parts_of = pytest.importorskip("rollbook.numerics.triton_one_query").parts_of
    assert parts_of(384, 1025) == (2, 576)
    assert parts_of(384, 200) == (1, 256)
    assert parts_of(2048, 32768) == (1, 32768)
    assert parts_of(1, 32768) == (32, 1024)
    for programs in (1, 7, 300):
        for length in (1, 63, 65, 1000, 8192):
            parts, size = parts_of(programs, length)
            assert (parts - 1) * size < length <= parts * size


OTHER: dict[str, dict[str, Any]] = {
    "on a CPU": {},
    "a bias of positions": {"position_bias": torch.zeros(3, 4, 1, 20)},
    "an unknown argument": {"strange": 1},
    "dropped weights": {"dropout": 1.0},
}


@pytest.mark.parametrize("options", OTHER.values(), ids=OTHER.keys())
def test_what_no_kernel_computes_is_what_transformers_computes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_kernels, "DEVICE", "cpu" if options else "cuda")
    query, key, value = (tensor.cpu() for tensor in inputs((2, 2, 16, 16), 20))
    mask = visible(20).cpu()
    found, weights = one_query_attention(Layer(2), query, key, value, mask, scaling=0.3, **options)
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask, scaling=0.3, **options)
    assert torch.equal(found, expected)
    assert weights is None


def test_several_queries_and_masks_of_heads_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_kernels, "DEVICE", "cpu")
    _, key, value = (tensor.cpu() for tensor in inputs((2, 2, 16, 16), 20))
    for query, mask in (
        (torch.randn(3, 4, 2, 16), None),
        (torch.randn(3, 4, 1, 16), torch.zeros(3, 4, 1, 20)),
        (torch.randn(3, 4, 1, 16, requires_grad=True), None),
    ):
        found, _ = one_query_attention(Layer(2), query, key, value, mask)
        assert torch.equal(found, sdpa_attention_forward(Layer(2), query, key, value, mask)[0])


def test_scores_with_a_cap_are_refused_as_by_transformers() -> None:
    query, key, value = inputs((2, 2, 16, 16), 20)
    with pytest.raises(ValueError, match="softcap"):
        one_query_attention(Layer(2), query, key, value, None, softcap=30.0)


@pytest.fixture
def torch_norms(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of replaced norms, which are computed without kernels here."""
    found: list[Tensor] = []

    def normed(x: Tensor, norm: Any) -> Tensor:
        found.append(x)
        expected: Tensor = norm.reference(x)
        return expected

    monkeypatch.setattr(module_kernels, "rms_norm", normed)
    return found


def test_a_module_has_kernels_within_a_step_only(torch_norms: list[Tensor]) -> None:
    module = family("qwen3").model().requires_grad_(False)
    kernels = StepKernels(module)
    norms = [part for part in module.modules() if type(part).__name__.endswith("RMSNorm")]
    assert str(kernels) == f"attention, {len(norms)} norms"
    ids_1T = torch.tensor([[5, 6, 7]])
    expected = module(input_ids=ids_1T).logits
    torch_norms.clear()
    with kernels.in_module():
        assert module.config._attn_implementation == module_kernels.NAME
        torch.testing.assert_close(module(input_ids=ids_1T).logits, expected)
        assert len(torch_norms) == len(norms)
    with pytest.raises(ValueError, match="input_ids"), kernels.in_module():
        module()
    assert module.config._attn_implementation == "sdpa"
    assert not [part for part in norms if "forward" in vars(part)]
    assert torch.equal(module(input_ids=ids_1T).logits, expected)
    assert len(torch_norms) == len(norms)


@pytest.mark.usefixtures("torch_norms")
def test_a_discarded_forward_leaves_the_module_as_it_was() -> None:
    module = family("qwen3").model().requires_grad_(False)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    forward: Any = ModuleForward(module, max_model_len=32)
    forward.step_kernels = StepKernels(module)
    assert relative_error(forward, module) < 1e-5
    forward.discard()
    assert forward.step_kernels is None
    assert module.config._attn_implementation == "sdpa"
    for name, part in module.named_modules():
        assert vars(part).keys() == before[name].keys()
    assert not module.get_output_embeddings()._forward_pre_hooks


def test_a_norm_with_another_formula_stays(torch_norms: list[Tensor]) -> None:
    module = family("qwen3").model().requires_grad_(False)
    kind = type(module.model.norm)

    class DoubledRMSNorm(kind):  # type: ignore[misc, valid-type]  # the class of this family
        def forward(self, hidden_states: Tensor) -> Tensor:
            doubled: Tensor = 2 * super().forward(hidden_states)
            return doubled

    total = len(StepKernels(module)._norms)
    module.model.norm.__class__ = DoubledRMSNorm
    torch_norms.clear()
    assert len(StepKernels(module)._norms) == total - 1
    assert all(len(x) == 4 for x in torch_norms)


@pytest.mark.parametrize(
    ("kind", "reason"), [("deepseek_v32", "depends on the name of its attention"), ("gpt_oss", "is not sdpa")]
)
def test_attention_that_cannot_be_replaced_by_name_stays(kind: str, reason: str) -> None:
    found = why_not_replaced(family(kind).model())
    assert found is not None
    assert reason in found


@pytest.mark.usefixtures("torch_norms")
def test_kernels_that_fail_or_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = family("qwen3").model().requires_grad_(False)
    forward = ModuleForward(module, max_model_len=32)
    monkeypatch.setattr("rollbook.inference.engines.embedded.build.kernels_missing", None)

    def wrong(x: Tensor, norm: Any) -> Tensor:
        return x

    def raising(x: Tensor, norm: Any) -> Tensor:
        raise ValueError("it does not compile")

    kernels = StepKernels(module)
    monkeypatch.setattr("rollbook.inference.engines.embedded.build.StepKernels", lambda module: kernels)
    for rms_norm, reason in ((wrong, "relative error"), (raising, "ValueError: it does not compile")):
        choices: list[str] = []
        monkeypatch.setattr(module_kernels, "rms_norm", rms_norm)
        use_step_kernels(forward, module, choices)
        assert forward.step_kernels is None
        assert len(choices) == 1
        assert reason in choices[0]


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_5_text", "falcon_h1", "deepseek_v3"])
@pytest.mark.usefixtures("on_this_device")
def test_decode_steps_have_the_logits_of_the_module(kind: str) -> None:
    module = family(kind).model().to(DEVICE).requires_grad_(False)
    choices: list[str] = []
    states = StateForward(module, max_model_len=64)
    forwards = [states, states.fixed()]
    if kind in {"llama", "qwen3", "deepseek_v3"}:
        forwards.append(ModuleForward(module, max_model_len=64))  # type: ignore[arg-type]  # both have kernels
    for forward in forwards:
        use_step_kernels(forward, module, choices)
        assert forward.step_kernels is not None, choices
        assert "Triton, attention" in choices[-1]
        assert math.isfinite(error := relative_error(forward, module))
        assert error < 1e-4
