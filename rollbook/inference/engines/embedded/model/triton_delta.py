"""The Triton kernel of one step of a gated delta layer, and its launch function. Imported by `kernels.py` only, if Triton is
installed.

Does what `DeltaLayer.step` does after `moved`: a program computes one head of one row, and reads and writes its state once. Results
are rounded to the model's dtype at the same places as in the Hugging Face modules.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import triton
import triton.language as tl
from torch import Tensor

from rollbook.numerics.delta import EPSILON, DeltaInputs, DeltaLayer

WARPS = 8
"""For a state of 128 x 128 numbers, which a program has in registers."""


@triton.jit
def _convolved(inputs_ptr, kernel_ptr, first, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The channels from `first` on."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        at = (first + lanes) * WIDTH + tap
        factor = tl.load(kernel_ptr + at, mask=lanes < SIZE, other=0.0).to(tl.float32)
        total += tl.load(inputs_ptr + at, mask=lanes < SIZE, other=0.0).to(tl.float32) * factor
    total = total.to(inputs_ptr.dtype.element_ty).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(inputs_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _step(
    inputs_ptr, kernel_ptr, state_ptr, gates_ptr, rates_ptr, times_ptr, log_rates_ptr, biases_ptr, norm_ptr, is_added_ptr,
    out_ptr,
    channels, gates_stride, rates_stride, times_stride, epsilon, norm_epsilon, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    kind = out_ptr.dtype.element_ty
    inputs_ptr += row * channels * WIDTH
    query = _convolved(inputs_ptr, kernel_ptr, key_head * KEY_SIZE, KEY_SIZE, KEY_BLOCK, WIDTH)
    key = _convolved(inputs_ptr, kernel_ptr, (KEY_HEADS + key_head) * KEY_SIZE, KEY_SIZE, KEY_BLOCK, WIDTH)
    value = _convolved(inputs_ptr, kernel_ptr, 2 * KEY_HEADS * KEY_SIZE + head * SIZE, SIZE, BLOCK, WIDTH)
    query *= scale / tl.sqrt(tl.sum(query * query, axis=0) + epsilon)
    key *= 1.0 / tl.sqrt(tl.sum(key * key, axis=0) + epsilon)
    time = tl.load(times_ptr + row * times_stride + head).to(tl.float32) + tl.load(biases_ptr + head).to(tl.float32)
    passed = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(time)))
    decay = tl.exp(-tl.exp(tl.load(log_rates_ptr + head).to(tl.float32)) * passed)
    rate = 1.0 / (1.0 + tl.exp(-tl.load(rates_ptr + row * rates_stride + head).to(tl.float32)))
    rate = rate.to(kind).to(tl.float32)
    is_added = tl.load(is_added_ptr + row) != 0
    decay = tl.where(is_added, decay, 1.0)

    keys, lanes = tl.arange(0, KEY_BLOCK), tl.arange(0, BLOCK)
    is_in = (keys < KEY_SIZE)[:, None] & (lanes < SIZE)[None, :]
    state_at = state_ptr + ((row * HEADS + head) * KEY_SIZE + keys[:, None]) * SIZE + lanes[None, :]
    state = tl.load(state_at, mask=is_in, other=0.0) * decay
    written = (value - tl.sum(state * key[:, None], axis=0)) * rate
    written = tl.where(is_added, written, 0.0)
    state += key[:, None] * written[None, :]
    tl.store(state_at, state, mask=is_in)

    result = tl.sum(state * query[:, None], axis=0).to(kind).to(tl.float32)
    normed = (result / tl.sqrt(tl.sum(result * result, axis=0) / SIZE + norm_epsilon)).to(kind).to(tl.float32)
    normed = (normed * tl.load(norm_ptr + lanes, mask=lanes < SIZE, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    gates = tl.load(gates_ptr + row * gates_stride + head * SIZE + lanes, mask=lanes < SIZE, other=0.0).to(tl.float32)
    gated = normed * (gates / (1.0 + tl.exp(-gates)))
    tl.store(out_ptr + (row * HEADS + head) * SIZE + lanes, gated.to(kind), mask=lanes < SIZE)


def launch_step(
    delta: DeltaLayer, new: DeltaInputs, inputs_NCK: Tensor, state_NHDV: Tensor, is_added_N: Tensor, *, out_ND: Tensor
) -> None:
    """Changes the state in place. `inputs_NCK`: with the new token."""
    rows, channels, width = inputs_NCK.shape
    _step[(rows, delta.value_heads)](
        inputs_NCK, delta.kernel_C1K, state_NHDV, new.gates, new.rates, new.times, delta.log_rates_H, delta.time_biases_H,
        delta.norm_V, is_added_N, out_ND,
        channels, new.gates.stride(0), new.rates.stride(0), new.times.stride(0), EPSILON, delta.norm_epsilon,
        delta.key_size**-0.5,
        KEY_HEADS=delta.key_heads, HEADS=delta.value_heads, KEY_SIZE=delta.key_size, SIZE=delta.value_size, WIDTH=width,
        KEY_BLOCK=triton.next_power_of_2(delta.key_size), BLOCK=triton.next_power_of_2(delta.value_size), num_warps=WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
