"""Triton kernels that compute one row at a time, and their launch functions. Imported by `operations.py` only, if Triton is
installed.

Results are rounded to the model's dtype at the same places as in the Hugging Face modules.
"""

# M tokens, E hidden size, F feed-forward size, K summed dimension, N outputs, R heads, D head size, W rotated width

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollbook.numerics.module_parts import Activation
from rollbook.numerics.recipe import Norm

GATE_BLOCK = 1024
MOST_PARTS = 1024
"""Programs that sum the gradient of a norm's weight."""
FEW = 16
"""The smallest tile of `tl.dot`."""


@triton.jit
def _rms_norm(
    x_ptr, added_ptr, weight_ptr, out_ptr, epsilon, width, stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ADDS_ONE: tl.constexpr, ROUNDS_ONCE: tl.constexpr, IS_SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    start = (row // HEADS) * stride + (row % HEADS) * width
    x = tl.load(x_ptr + start + columns, mask=is_in, other=0.0).to(tl.float32)
    if IS_SUM:
        added = tl.load(added_ptr + start + columns, mask=is_in, other=0.0).to(tl.float32)
        total = (x + added).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + start + columns, total, mask=is_in)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    normed = x * scale
    if not ROUNDS_ONCE:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + start + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=is_in)


def launch_rms_norm(x_ME: Tensor, norm: Norm, out_ME: Tensor, *, added_ME: Tensor | None = None) -> None:
    """Rows that are longer than the norm's weight consist of parts, which are normalised separately. `out_ME` may be `x_ME`.

    `added_ME`: is added to `x_ME` in place first, both contiguous.
    """
    width = len(norm.weight_E)
    heads, block = x_ME.shape[1] // width, triton.next_power_of_2(width)
    _rms_norm[(len(x_ME) * heads,)](
        x_ME, x_ME if added_ME is None else added_ME, norm.weight_E, out_ME, norm.epsilon, width, x_ME.stride(0),
        HEADS=heads, BLOCK=block, ADDS_ONE=norm.adds_one, ROUNDS_ONCE=norm.rounds_once, IS_SUM=added_ME is not None,
        num_warps=4 if block <= 2048 else 8, enable_fp_fusion=True,
    )  # fmt: skip


# Numbers that follow the tokens of a pass are neither constants nor specialised: each new one would compile the kernel again, for
# about a second in the middle of a step.
@triton.jit(do_not_specialize=["rows", "each"])
def _rms_norm_gradient(
    x_ptr, weight_ptr, gradient_ptr, out_ptr, partial_ptr, epsilon, rows, each, width,
    BLOCK: tl.constexpr, ADDS_ONE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    partial = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * each, tl.minimum(rows, (program + 1) * each)):
        x = tl.load(x_ptr + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
        normed = x * scale
        partial += gradient * normed
        weighted = gradient * weight
        along = tl.sum(weighted * normed, axis=0) / width
        change = (weighted - normed * along) * scale
        tl.store(out_ptr + row * width + columns, change.to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(partial_ptr + program * width + columns, partial, mask=is_in)


def launch_rms_norm_gradient(x_ME: Tensor, norm: Norm, gradient_ME: Tensor) -> tuple[Tensor, Tensor]:
    """Of the inputs and of the weight."""
    rows, width = x_ME.shape
    block = triton.next_power_of_2(width)
    each = max(FEW, triton.cdiv(rows, MOST_PARTS))
    parts = triton.cdiv(rows, each)
    out_ME = torch.empty_like(x_ME)
    partial_PE = torch.empty((parts, width), dtype=torch.float32, device=x_ME.device)
    _rms_norm_gradient[(parts,)](
        x_ME, norm.weight_E, gradient_ME, out_ME, partial_PE, norm.epsilon, rows, each, width, BLOCK=block,
        ADDS_ONE=norm.adds_one, num_warps=4 if block <= 2048 else 8, enable_fp_fusion=True,
    )  # fmt: skip
    return out_ME, partial_PE.sum(dim=0).to(norm.weight_E.dtype)


@triton.jit
def _rotate(
    x_ptr, cosines_ptr, sines_ptr, out_ptr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, IS_GRADIENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    lanes = tl.arange(0, HALF_BLOCK)
    is_angle = lanes < WIDTH // 2
    cosine = tl.load(cosines_ptr + token * WIDTH + lanes, mask=is_angle, other=0.0)
    product = cosine.dtype
    cosine = cosine.to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + token * WIDTH + lanes, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    if IS_GRADIENT:
        sine = -sine
    at = token * (HEADS * SIZE) + heads * SIZE + lanes[None, :]
    is_in = (heads < HEADS) & is_angle[None, :]
    first = tl.load(x_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + WIDTH // 2, mask=is_in, other=0.0).to(tl.float32)
    # Products are rounded as in the Hugging Face modules.
    turned_first = (first * cosine).to(product).to(tl.float32) - (second * sine).to(product).to(tl.float32)
    turned_second = (second * cosine).to(product).to(tl.float32) + (first * sine).to(product).to(tl.float32)
    tl.store(out_ptr + at, turned_first.to(product), mask=is_in)
    tl.store(out_ptr + at + WIDTH // 2, turned_second.to(product), mask=is_in)
    if WIDTH < SIZE:
        columns = WIDTH + tl.arange(0, REST_BLOCK)[None, :]
        rest = token * (HEADS * SIZE) + heads * SIZE + columns
        is_rest = (heads < HEADS) & (columns < SIZE)
        tl.store(out_ptr + rest, tl.load(x_ptr + rest, mask=is_rest, other=0.0), mask=is_rest)


def launch_rotate(x_MRD: Tensor, cosines_MW: Tensor, sines_MW: Tensor, out_MRD: Tensor, *, is_gradient: bool) -> None:
    """Rotate pairs of numbers whose distance is half of the rotated width, by the angle of their token; all contiguous. The second
    halves of the tables repeat the first. `is_gradient`: rotate back."""
    tokens, heads, size = x_MRD.shape
    width = cosines_MW.shape[1]
    _rotate[(tokens,)](
        x_MRD, cosines_MW, sines_MW, out_MRD, HEADS=heads, SIZE=size, WIDTH=width,
        HEADS_BLOCK=triton.next_power_of_2(heads), HALF_BLOCK=triton.next_power_of_2(width // 2),
        REST_BLOCK=triton.next_power_of_2(max(1, size - width)), IS_GRADIENT=is_gradient,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _sigmoid_of(gates, ACTIVATION: tl.constexpr):
    """Each activation is its input times a sigmoid: `gelu_tanh` is x sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3)."""
    inner = gates
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    return 1.0 / (1.0 + tl.exp(-inner))


@triton.jit
def _gate(gates_ptr, ups_ptr, out_ptr, width, stride, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gates = tl.load(gates_ptr + token * stride + columns, mask=is_in, other=0.0)
    ups = tl.load(ups_ptr + token * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    wide = gates.to(tl.float32)
    passed = wide / (1.0 + tl.exp(-wide))
    if ACTIVATION != "silu":
        passed = wide * _sigmoid_of(wide, ACTIVATION)
    passed = passed.to(gates.dtype).to(tl.float32)
    tl.store(out_ptr + token * width + columns, (passed * ups).to(out_ptr.dtype.element_ty), mask=is_in)


def launch_gate(gates_MF: Tensor, ups_MF: Tensor, out_MF: Tensor, activation: Activation) -> None:
    width = out_MF.shape[1]
    block = min(GATE_BLOCK, triton.next_power_of_2(width))
    grid = (len(out_MF), triton.cdiv(width, block))
    _gate[grid](
        gates_MF, ups_MF, out_MF, width, gates_MF.stride(0), BLOCK=block, ACTIVATION=activation,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _gate_gradient(
    gates_ptr, ups_ptr, gradient_ptr, to_gates_ptr, to_ups_ptr, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < count
    gates = tl.load(gates_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    ups = tl.load(ups_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    sigmoid = _sigmoid_of(gates, ACTIVATION)
    slope = 1.0
    if ACTIVATION == "gelu_tanh":
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gates * gates)
    to_gates = gradient * ups * sigmoid * (1.0 + gates * slope * (1.0 - sigmoid))
    tl.store(to_gates_ptr + at, to_gates.to(to_gates_ptr.dtype.element_ty), mask=is_in)
    tl.store(to_ups_ptr + at, (gradient * gates * sigmoid).to(to_ups_ptr.dtype.element_ty), mask=is_in)


def launch_gate_gradient(gates: Tensor, ups: Tensor, gradient: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """All contiguous."""
    to_gates, to_ups = torch.empty_like(gates), torch.empty_like(ups)
    grid = (triton.cdiv(gates.numel(), GATE_BLOCK),)
    _gate_gradient[grid](
        gates, ups, gradient, to_gates, to_ups, gates.numel(), BLOCK=GATE_BLOCK, ACTIVATION=activation,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return to_gates, to_ups


@triton.jit(do_not_specialize=["rows"])
def _product(
    x_ptr, weight_ptr, out_ptr, rows, width, depth, x_stride, weight_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    at_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_width = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at_depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + at_rows[:, None].to(tl.int64) * x_stride + at_depth[None, :]
    weight_ptrs = weight_ptr + at_width[None, :].to(tl.int64) * weight_stride + at_depth[:, None]
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        is_in = at_depth + start < depth
        x = tl.load(x_ptrs + start, mask=(at_rows < rows)[:, None] & is_in[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=(at_width < width)[None, :] & is_in[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")  # float32 is not rounded to TF32
    out_ptrs = out_ptr + at_rows[:, None].to(tl.int64) * width + at_width[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(at_rows < rows)[:, None] & (at_width < width)[None, :])


def launch_product(x_MK: Tensor, weight_KN: Tensor, out_MN: Tensor) -> None:
    """x @ weight for few rows: narrow tiles, so that many programs share the weight."""
    (rows, depth), width = x_MK.shape, weight_KN.shape[1]
    tile = FEW if rows <= FEW else 64
    _product[(triton.cdiv(rows, tile), triton.cdiv(width, FEW))](
        x_MK, weight_KN, out_MN, rows, width, depth, x_MK.stride(0), weight_KN.stride(1),
        ROWS=tile, WIDTH=FEW, DEPTH=256 if rows <= FEW else 128, num_warps=4, num_stages=4, enable_fp_fusion=True,
    )  # fmt: skip
