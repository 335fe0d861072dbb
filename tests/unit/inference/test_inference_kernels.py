"""The Triton kernels compute what the operations in plain torch compute.

They need a GPU, or Triton's interpreter: `make test-kernels`.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.inference.engines.embedded.build import use_kernels
from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.kernels import KernelOps, SlotKernelOps, sample_with_kernels
from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error
from rollbook.inference.engines.embedded.model.packed import PackedStep, PackedTorchOps
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape
from rollbook.inference.engines.embedded.paged.runner import packed_error
from rollbook.inference.engines.embedded.paged.step_input import PromptSlice, StepShape, layout_of
from rollbook.inference.engines.embedded.row_table import DecodeLines, RowTable
from rollbook.inference.engines.embedded.sampling import RowSampling, sample
from rollbook.numerics.delta import DeltaLayer
from rollbook.numerics.module_parts import Activation
from rollbook.numerics.operations import float32_logits, kernels_missing
from rollbook.numerics.recipe import Attention, HeadNorms, Norm, Rotary
from tests.models.families import family

CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        kernels_missing is not None or not CAN_RUN, reason=kernels_missing or "no GPU, and TRITON_INTERPRET is not 1"
    ),
    # The interpreter computes with numpy, which warns of infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PAGE, ROWS, WIDTH = 16, 6, 8
SHAPES = {
    "three key heads": HeadShape(queries=9, keys=3, size=16),
    "one key head": HeadShape(queries=5, keys=1, size=32),
    "a size that is no power of two": HeadShape(queries=4, keys=2, size=24),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows with random keys and values in shuffled blocks, and a step over them."""

    heads: HeadShape
    step: PackedStep
    blocks: Tensor
    ops: tuple[KernelOps, PackedTorchOps]

    def fused(self) -> Tensor:
        return random(len(self.step.tokens_M), self.heads.fused * self.heads.size, seed=5)


def rotary_of(width: int, **options: Any) -> Rotary:
    angles_TF = random(WIDTH * PAGE, width // 2, seed=1)
    return Rotary(cosines_TF=angles_TF.cos(), sines_TF=angles_TF.sin(), **{"is_paired": False, **options})


def make_case(
    heads: HeadShape,
    *,
    pieces: list[PromptSlice] | None = None,
    chunk: int = 1024,
    padding: int = 3,
    activation: Activation = "silu",
    stored: torch.dtype | None = None,
) -> Case:
    pieces = pieces or []
    positions = np.array([0, 15, 16, 37, 100])
    table = RowTable(ROWS)
    table.positions[: len(positions)] = positions
    ops = KernelOps(heads, activation), PackedTorchOps(heads, activation)
    is_split = chunk < 128
    decoding = np.arange(len(positions))
    tokens = len(positions) + sum(len(piece.tokens) for piece in pieces) + padding
    tile = ops[0].query_tile
    shape = (
        StepShape.mixed(tokens, ROWS + 2, key_heads=heads.keys, query_tile=tile, is_split=is_split)
        if pieces
        else StepShape.decode(tokens, key_heads=heads.keys, is_split=is_split)
    )
    layout = layout_of(shape)
    block = torch.empty(layout.length, dtype=torch.int32)
    nothing = np.empty(0, dtype=np.int64)
    layout.fill(
        block.numpy(),
        table,
        DecodeLines.undrafted(decoding, table),
        pieces,
        changes=(nothing, nothing.astype(np.int32)),
        chunk=chunk,
        query_tile=tile,
    )
    tables_SP = torch.zeros(ROWS + 1, WIDTH, dtype=torch.int32)
    shuffled = torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(3)) + 1
    tables_SP[:ROWS] = shuffled.view(ROWS, WIDTH)
    last_tokens_S = torch.zeros(ROWS + 1, dtype=torch.int32)
    step = layout.step(block.to(DEVICE), last_tokens_S=last_tokens_S.to(DEVICE), tables_SP=tables_SP.to(DEVICE))
    blocks = random(ROWS * WIDTH + 1, 2, heads.keys, PAGE, heads.size, seed=4)
    # A block may hold NaN of an earlier owner: what follows the last position of a row must not be read.
    for row, position in enumerate(positions):
        blocks[tables_SP[row, position // PAGE], :, :, position % PAGE + 1 :] = float("nan")
    return Case(heads=heads, step=step, blocks=blocks if stored is None else in_bytes(blocks, stored), ops=ops)


def in_bytes(blocks: Tensor, stored: torch.dtype) -> Tensor:
    encoded = eight_bits.encoded(blocks, stored)
    found = torch.empty_like(encoded)
    numbers, exponents = eight_bits.parts_of_blocks(found)
    numbers.copy_(encoded[..., :-1])
    exponents.copy_(encoded[..., -1:])
    return found


def is_real(case: Case) -> Tensor:
    return case.step.positions_M >= 0


def assert_same_attention(case: Case, **options: Any) -> None:
    attention = Attention(**{"scale": 0.3, **options})
    ours, expected = (ops.attend(case.fused(), case.step, case.blocks, attention) for ops in case.ops)
    torch.testing.assert_close(ours[is_real(case)], expected[is_real(case)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk", [16, 32, 1024], ids=["split by block", "split by two blocks", "not split"])
@pytest.mark.parametrize("stored", [None, *eight_bits.LARGEST], ids=str)
def test_decode_attention(name: str, chunk: int, stored: torch.dtype | None) -> None:
    assert_same_attention(make_case(SHAPES[name], chunk=chunk, stored=stored))


@pytest.mark.parametrize("chunk", [32, 64, 1024], ids=["split", "split by what a program reads", "not split"])
@pytest.mark.parametrize("window", [1, 20, 37, 90])
def test_decode_attention_in_a_window(window: int, chunk: int) -> None:
    assert_same_attention(make_case(SHAPES["one key head"], chunk=chunk), window=window)


@pytest.mark.parametrize("chunk", [16, 1024], ids=["split", "not split"])
def test_drafted_tokens_have_the_bits_of_decoding_one_by_one(chunk: int) -> None:
    """They are further decoding rows with the same blocks: each reads the keys of those before it, and none after."""
    heads, rows = SHAPES["three key heads"], np.array([2, 2, 2, 4])
    offsets, depth = np.array([0, 1, 2, 0]), 3
    case = make_case(heads, chunk=chunk)
    table, of = RowTable(ROWS), Attention(scale=0.3, rotary=rotary_of(heads.size))
    table.positions[[2, 4]] = 45, 100
    table.is_active[[2, 4]] = True
    fused_MX = random(len(rows), heads.fused * heads.size, seed=6)

    def attended(lines: list[int], blocks: Tensor) -> Tensor:
        shape = StepShape.decode(len(lines), key_heads=heads.keys, is_split=chunk < 128, parts=depth * WIDTH)
        layout = layout_of(shape)
        block = torch.empty(layout.length, dtype=torch.int32)
        drafted = DecodeLines(
            rows=rows[lines],
            offsets=offsets[lines],
            tokens=np.zeros(len(lines), dtype=np.int32),
            positions=(table.positions[rows] + offsets)[lines].astype(np.int32),
            columns=(rows + offsets * (ROWS + 1))[lines],
            keys=np.zeros(len(lines), dtype=np.int64),
        )
        nothing = np.empty(0, dtype=np.int64)
        changes = nothing, nothing.astype(np.int32)
        layout.fill(block.numpy(), table, drafted, [], changes=changes, chunk=chunk, query_tile=1)
        tokens_S = torch.zeros(ROWS + 1, dtype=torch.int32, device=DEVICE)
        step = layout.step(block.to(DEVICE), last_tokens_S=tokens_S, tables_SP=case.step.tables_SP)
        own_MX = fused_MX[lines].clone()
        case.ops[0].rotate_and_store(own_MX, step, blocks, of)
        return case.ops[0].attend(own_MX, step, blocks, of)

    # What follows a position is of refused drafts: it must not be read.
    one, other = (random(*case.blocks.shape, seed=4) for _ in range(2))
    together = attended([0, 1, 2, 3], one)
    alone = torch.cat([attended([line], other) for line in (0, 3, 1, 2)])
    assert torch.equal(together[[0, 3, 1, 2]], alone)
    assert not torch.isnan(together).any()
    assert torch.equal(one, other)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the elements of new tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.empty.memory_format:
            self.count += math.prod(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_split_rows_take_no_memory_for_lanes_without_a_head(name: str) -> None:
    case = make_case(SHAPES[name], chunk=16)
    fused_MX = case.fused()
    with Allocations() as allocated:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        case.ops[0].attend(fused_MX, case.step, case.blocks, Attention(scale=1.0))
    heads, items = case.heads, len(case.step.item_tokens_W)
    result = len(case.step.tokens_M) * heads.queries * heads.size
    # A mean and a weight for each part and head.
    assert allocated.count <= result + items * heads.queries * (heads.size + 1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stored", [None, *eight_bits.LARGEST], ids=str)
def test_attention_of_prompts_and_decoding_rows_in_one_step(name: str, stored: torch.dtype | None) -> None:
    piece = PromptSlice(5, 0, np.arange(30, dtype=np.int32), is_last=True)
    assert_same_attention(make_case(SHAPES[name], pieces=[piece], chunk=32, stored=stored))


@pytest.mark.parametrize("window", [3, 20, 70])
def test_attention_of_prompts_in_a_window(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first chunk has keys of the first queries of a tile only.
    monkeypatch.setattr("rollbook.inference.engines.embedded.model.kernels.CHUNK", 64)
    piece = PromptSlice(5, 50, np.arange(60, dtype=np.int32), is_last=True)
    assert_same_attention(make_case(SHAPES["one key head"], pieces=[piece], chunk=32), window=window)


def test_capped_scores() -> None:
    tokens = np.arange(30, dtype=np.int32)
    case = make_case(SHAPES["one key head"], pieces=[PromptSlice(5, 0, tokens, is_last=True)], chunk=32)
    assert_same_attention(case, scale=2.0, cap=3.0)


@pytest.mark.parametrize("chunk", [16, 1024], ids=["split", "not split"])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_part_of_the_weights(window: int | None, chunk: int) -> None:
    piece = PromptSlice(5, 50, np.arange(30, dtype=np.int32), is_last=True)
    case = make_case(SHAPES["three key heads"], pieces=[piece], chunk=chunk)
    assert_same_attention(case, window=window, sinks_R=2 * random(case.heads.queries, seed=12))


def norms_of(size: int, *, heads: tuple[int, int] = (1, 1), **options: Any) -> HeadNorms:
    queries, keys = (
        Norm(random(size * count, seed=seed), 1e-5, True, True) for seed, count in zip((8, 9), heads, strict=True)
    )
    return HeadNorms(queries, keys, **options)


LAYERS: dict[str, Callable[[HeadShape], dict[str, Any]]] = {
    "halves": lambda heads: {"rotary": rotary_of(heads.size)},
    "norms of heads": lambda heads: {"rotary": rotary_of(heads.size), "norms": norms_of(heads.size)},
    "norms of all heads": lambda heads: {
        "rotary": rotary_of(heads.size),
        "norms": norms_of(heads.size, heads=(heads.queries, heads.keys)),
    },
    "norms after the rotation": lambda heads: {
        "rotary": rotary_of(heads.size),
        "norms": norms_of(heads.size, is_after_rotation=True),
    },
    "a part of each head": lambda heads: {"rotary": rotary_of(heads.size // 2)},
    "pairs": lambda heads: {"rotary": rotary_of(heads.size, is_paired=True)},
    "a part of each head, pairs": lambda heads: {"rotary": rotary_of(heads.size // 2, is_paired=True)},
    "scaled queries": lambda heads: {
        "rotary": rotary_of(heads.size, query_scales_T=random(WIDTH * PAGE, seed=11).abs())
    },
    "no positions": lambda _: {},
}


@pytest.mark.parametrize(
    ("name", "layer"),
    [*((name, "norms of heads") for name in SHAPES), *(("a size that is no power of two", layer) for layer in LAYERS)],
)
def test_rotation_and_cache_write(name: str, layer: str) -> None:
    case = make_case(SHAPES[name], pieces=[PromptSlice(5, 20, np.arange(14, dtype=np.int32), is_last=True)])
    attention = Attention(scale=1.0, **LAYERS[layer](case.heads))
    queries, stored = [], []
    for ops in case.ops:
        fused_MX, blocks = case.fused(), case.blocks.clone()
        ops.rotate_and_store(fused_MX, case.step, blocks, attention)
        queries.append(fused_MX[is_real(case), : case.heads.queries * case.heads.size])
        stored.append(blocks)
    torch.testing.assert_close(*queries, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*stored, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lines_are_scaled_to_the_end_of_the_8_bit_floats(dtype: torch.dtype) -> None:
    case = make_case(SHAPES["one key head"])
    # Numbers of the format times a power of two for each line: the interpreter rounds without a carry.
    numbers_ME = (random(9, 40, seed=3) * 100).clamp(-400, 400).to(torch.float8_e4m3fn).float()
    numbers_ME[:, 7] = 448
    numbers_ME[4] = 0
    wide_ME = (numbers_ME * torch.exp2(torch.arange(-5.0, 4.0, device=DEVICE))[:, None]).to(dtype)
    for x_ME in (wide_ME, wide_ME[:, 3:35]):
        (ours, our_scales), (expected, expected_scales) = (ops.scaled(x_ME) for ops in case.ops)
        assert torch.equal(our_scales, expected_scales)
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal((ours.float() * our_scales).to(dtype), x_ME)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_rotated", [False, True], ids=["no positions", "halves"])
@pytest.mark.parametrize("stored", eight_bits.LARGEST, ids=str)
def test_keys_and_values_are_written_with_eight_bits(name: str, is_rotated: bool, stored: torch.dtype) -> None:
    piece = PromptSlice(5, 20, np.arange(14, dtype=np.int32), is_last=True)
    case = make_case(SHAPES[name], pieces=[piece], stored=stored)
    # A vector of zeros, tokens of very different sizes, and vectors with numbers of very different sizes.
    fused_MXD = case.fused().view(-1, case.heads.fused, case.heads.size)
    fused_MXD[0, -1], fused_MXD[1:3], fused_MXD[3, :, ::3] = 0, fused_MXD[1:3] * 1e5, fused_MXD[3, :, ::3] * 1e-4
    for _ in range(2):
        fused_MXD = eight_bits.decoded(eight_bits.encoded(fused_MXD, stored), fused_MXD.dtype)
    attention = Attention(scale=1.0, rotary=rotary_of(case.heads.size) if is_rotated else None)
    found = []
    for ops in case.ops:
        blocks = case.blocks.clone()
        ops.rotate_and_store(fused_MXD.flatten(1).clone(), case.step, blocks, attention)
        found.append(eight_bits.parts_of_blocks(blocks))
    (ours, our_exponents), (expected, expected_exponents) = found
    assert torch.equal(our_exponents, expected_exponents)
    # Rotated numbers are rounded. The interpreter rounds floats without a carry to the next power of two.
    assert (ours != expected).float().mean() < (2e-3 if is_rotated else 1e-9)
    assert not torch.equal(expected, eight_bits.parts_of_blocks(case.blocks)[0])


@pytest.mark.parametrize("is_wide", [False, True], ids=["every product", "once"])
def test_a_rotation_is_rounded_as_in_the_module(is_wide: bool) -> None:
    case = make_case(SHAPES["one key head"])
    rotary = rotary_of(case.heads.size)
    tables = (table.half().float() if is_wide else table.half() for table in (rotary.cosines_TF, rotary.sines_TF))
    rotary = Rotary(**dict(zip(("cosines_TF", "sines_TF"), tables, strict=True)), is_paired=False)
    fused_MX, expected_MX = case.fused().half(), case.fused().half()
    attention = Attention(scale=1.0, rotary=rotary)
    case.ops[0].rotate_and_store(fused_MX, case.step, case.blocks.half(), attention)
    at_M = case.step.positions_M.clamp(min=0).long()
    heads_MXD = expected_MX.view(len(expected_MX), -1, case.heads.size)
    turned = heads_MXD[:, : case.heads.queries + case.heads.keys]
    cosines, sines = (table[at_M][:, None] for table in rotary.tables_TW)
    turned.copy_(turned * cosines + turned.roll(case.heads.size // 2, -1) * sines)
    rotated = (case.heads.queries + case.heads.keys) * case.heads.size
    assert torch.equal(fused_MX[is_real(case), :rotated], expected_MX[is_real(case), :rotated])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_and_gate(activation: Activation) -> None:
    ours, expected = make_case(SHAPES["one key head"], activation=activation).ops
    x_ME, norm = random(21, 48), Norm(random(48, seed=2), 1e-5)
    torch.testing.assert_close(ours.norm(x_ME, norm), expected.norm(x_ME, norm), rtol=1e-4, atol=1e-5)
    # Wider than what one program reads.
    both_MF = random(3, 2 * 1100)
    torch.testing.assert_close(ours.gate(both_MF), expected.gate(both_MF), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("adds_one", "rounds_once"), [(False, False), (False, True), (True, True)])
def test_a_norm_is_rounded_as_in_the_module(adds_one: bool, rounds_once: bool) -> None:
    ours, _ = make_case(SHAPES["one key head"]).ops
    x_ME = random(21, 48).half()
    norm = Norm(random(48, seed=2).half(), 1e-5, adds_one, rounds_once)
    is_equal = ours.norm(x_ME, norm) == norm.reference(x_ME)
    # The sum of squares may have another order.
    assert is_equal.float().mean() > 0.97
    hidden_ME, added_ME = random(21, 48, seed=3).half(), random(21, 48, seed=4).half()
    sum_ME = hidden_ME + added_ME
    assert torch.equal(ours.add_and_norm(hidden_ME, added_ME, norm), ours.norm(sum_ME, norm))
    assert torch.equal(hidden_ME, sum_ME), "the sum is rounded before it is normalised"
    other = Norm(norm.weight_E, 1e-5, adds_one, not rounds_once)
    assert (ours.norm(x_ME, norm) == other.reference(x_ME)).float().mean() < 0.95


FAMILIES = [
    "ministral3",
    "hunyuan_v1_dense",
    "granite",
    "phi3",
    "glm4",
    "ernie4_5",
    "olmo2",
    "smollm3",
    "gemma2",
    "gpt_oss",
]


def module_on_device(kind: str) -> Any:
    if DEVICE == "cuda" and kind in {"gpt_oss", "qwen3_next"}:
        pytest.skip("a GPU computes experts in bfloat16 only")
    return family(kind).model().to(DEVICE).requires_grad_(False)


@pytest.mark.parametrize("kind", ["llama", *FAMILIES])
def test_a_packed_step_has_the_logits_of_the_module(kind: str) -> None:
    module = module_on_device(kind)
    forward = LlamaForward(module, max_model_len=160)
    forward.packed_ops = KernelOps(forward.heads, forward.recipe.activation)
    with forward.short_windows(module):
        assert packed_error(forward, module, block_size=PAGE) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_steps_over_recurrent_states_have_the_logits_of_the_module(kind: str) -> None:
    module = module_on_device(kind)
    forward = LlamaForward(module, max_model_len=160)
    assert use_kernels(forward, module, [], exactness="bitwise")
    assert isinstance(forward.ops, SlotKernelOps)
    assert relative_error(forward, module) < 1e-4


def delta_of(
    *,
    sizes: tuple[int, int],
    is_grouped: bool,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 6),
) -> DeltaLayer:
    """`heads`: of keys and of values."""
    channels = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    return DeltaLayer(
        key_heads=heads[0],
        value_heads=heads[1],
        key_size=sizes[0],
        value_size=sizes[1],
        is_grouped=is_grouped,
        kernel_C1K=random(channels, 1, 4, seed=2).to(dtype),
        log_rates_H=random(heads[1], seed=3).to(dtype),
        time_biases_H=random(heads[1], seed=4).to(dtype),
        norm_V=random(sizes[1], seed=5).to(dtype),
        norm_epsilon=1e-6,
    )


def delta_inputs(delta: DeltaLayer, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of the projection, both states, and which rows get a token."""
    dtype, (inputs, state) = delta.norm_V.dtype, delta.state_sizes
    width = inputs[0] + delta.value_heads * (delta.value_size + 2)
    is_added_N = torch.tensor([row != 1 for row in range(rows)], device=DEVICE)
    return (
        3 * random(rows, width, seed=6).to(dtype),
        random(rows, *inputs, seed=7).to(dtype),
        random(rows, *state, seed=8),
        is_added_N,
    )


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((16, 16), (2, 6)), ((24, 40), (2, 6)), pytest.param((128, 128), (16, 32), id="Qwen3.5-4B")],
)
def test_a_step_of_a_gated_delta_layer_is_that_of_torch(
    sizes: tuple[int, int], heads: tuple[int, int], is_grouped: bool
) -> None:
    delta = delta_of(sizes=sizes, is_grouped=is_grouped, heads=heads)
    fused_NX, inputs_NCK, state_NHDV, is_added_N = delta_inputs(delta, 3)
    found_inputs, found_state = inputs_NCK.clone(), state_NHDV.clone()
    ops = SlotKernelOps(HeadShape(queries=2, keys=2, size=16), "silu")
    found_ND = ops.delta_step(fused_NX, delta, found_inputs, found_state, is_added_N)
    expected_ND = delta.step(fused_NX, inputs_NCK, state_NHDV, is_added_N)
    torch.testing.assert_close(found_ND, expected_ND, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_state, state_NHDV, rtol=1e-4, atol=1e-5)
    assert torch.equal(found_inputs, inputs_NCK)
    untouched = delta_inputs(delta, 3)[2][1]
    assert torch.equal(found_state[1], untouched)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 tokens, because the interpreter is slow."""
    monkeypatch.setattr("rollbook.numerics.triton_logprobs.TILE", 64)


def rows_of(count: int, *, temperature: float = 1.0, **changes: Any) -> RowSampling:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, count)
    rows = RowSampling(
        keys_N=torch.from_numpy(keys).to(DEVICE),
        temperatures_N=torch.full((count,), temperature, device=DEVICE),
        top_k_N=torch.zeros(count, dtype=torch.int32, device=DEVICE),
        top_p_N=torch.ones(count, device=DEVICE),
        is_scaled=True,
        is_truncated=False,
        is_any_greedy=True,
    )
    return replace(rows, **changes)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1e-30])
@pytest.mark.parametrize("vocab", [40, 64, 200])
@pytest.mark.usefixtures("small_tiles")
def test_sampled_tokens_have_the_logprob_of_the_softmax(vocab: int, temperature: float) -> None:
    logits_NV = random(7, vocab) * 4
    tokens_N, logprobs_N = sample_with_kernels(logits_NV, rows_of(7, temperature=temperature))
    expected_NV = torch.log_softmax((logits_NV - logits_NV.amax(1, keepdim=True)) / (temperature or 1.0), dim=-1)
    torch.testing.assert_close(logprobs_N, expected_NV.gather(1, tokens_N[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    if temperature in {0.0, 1e-30}:
        assert tokens_N.tolist() == logits_NV.argmax(dim=1).tolist()


@pytest.mark.usefixtures("small_tiles")
def test_samples_follow_the_distribution_across_tiles() -> None:
    vocab, count = 70, 150
    logits_V = torch.full((vocab,), float("-inf"), device=DEVICE)
    # In the first and in the second tile.
    places = [0, 18, 33, 63, 69]
    logits_V[places] = torch.tensor([0.0, 1.0, -1.0, 0.5, 1.5], device=DEVICE)
    tokens_N, _ = sample_with_kernels(logits_V.expand(count, vocab).contiguous(), rows_of(count))
    frequency = torch.bincount(tokens_N.cpu(), minlength=vocab)[places] / count
    assert int(torch.isin(tokens_N.cpu(), torch.tensor(places)).sum()) == count
    expected = logits_V[places].softmax(0).cpu()
    # Four standard deviations of each binomial frequency.
    assert ((frequency - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.usefixtures("small_tiles")
def test_a_row_draws_the_same_token_as_on_a_cpu(temperature: float) -> None:
    logits_NV = random(200, 300) * 3
    # An empty tile, an empty start and tokens that are much less likely than others.
    logits_NV[:, 64:128] = logits_NV[:, :5] = float("-inf")
    logits_NV[:, 200:] -= 12
    rows = rows_of(200, temperature=temperature)
    ours, expected = sample_with_kernels(logits_NV, rows), sample(logits_NV, rows)
    assert ours[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small_tiles")
def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits_NV = random(9, 150)
    tokens_N, _ = sample_with_kernels(logits_NV, rows_of(9))
    alone = rows_of(9)
    alone = replace(alone, keys_N=alone.keys_N[4:5], temperatures_N=alone.temperatures_N[4:5])
    assert sample_with_kernels(logits_NV[4:5].contiguous(), alone)[0].tolist() == [int(tokens_N[4])]


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_logits_a_greedy_row_takes_the_lowest_token() -> None:
    logits_NV = torch.zeros(2, 150, device=DEVICE)
    logits_NV[0, [30, 20, 140]] = 3.0
    logits_NV[1, [149, 100]] = 3.0
    tokens_N, _ = sample_with_kernels(logits_NV, rows_of(2, temperature=0.0))
    assert tokens_N.tolist() == [20, 100]


@pytest.mark.parametrize("vocab", [128, 150], ids=["whole tiles", "a part of a tile"])
@pytest.mark.usefixtures("small_tiles")
def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary_and_no_logprob(vocab: int) -> None:
    logits_NV = random(2, vocab)
    logits_NV[0, 3] = float("nan")
    logits_NV[1] = float("nan")
    tokens_N, logprobs_N = sample_with_kernels(logits_NV, rows_of(2))
    assert logprobs_N.isnan().all()
    assert ((tokens_N >= 0) & (tokens_N < vocab)).all()


@pytest.mark.usefixtures("small_tiles")
def test_truncated_rows_draw_from_the_most_likely_tokens_only() -> None:
    logits_NV = random(16, 150)
    rows = rows_of(16, top_k_N=torch.full((16,), 3, dtype=torch.int32, device=DEVICE), is_truncated=True)
    tokens_N, logprobs_N = sample_with_kernels(logits_NV, rows)
    top_NK = logits_NV.topk(3, dim=1)
    at_N = (top_NK.indices == tokens_N[:, None]).int().argmax(dim=1)
    assert (top_NK.indices == tokens_N[:, None]).any(dim=1).all()
    expected_NK = torch.log_softmax(top_NK.values, dim=-1)
    torch.testing.assert_close(logprobs_N, expected_NK.gather(1, at_N[:, None])[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.usefixtures("small_tiles")
def test_a_truncated_row_changes_no_bit_of_the_others(temperature: float) -> None:
    count = 64
    logits_NV = random(count, 150) * 3 + 5
    alone = sample_with_kernels(logits_NV, rows_of(count, temperature=temperature))
    top_k_N = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    top_p_N = torch.ones(count, device=DEVICE)
    top_k_N[0], top_p_N[1] = 3, 0.5
    mixed = rows_of(count, temperature=temperature, top_k_N=top_k_N, top_p_N=top_p_N, is_truncated=True)
    together = sample_with_kernels(logits_NV, mixed)
    for found, expected in zip(together, alone, strict=True):
        assert found[2:].tolist() == expected[2:].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_of_bfloat16_inputs_on_a_gpu_are_float32() -> None:
    hidden = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    logits = float32_logits(hidden, head)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ head.double().t(), rtol=0, atol=1e-3)
