"""The Triton kernels and their launch functions. Imported by `kernels.py` only, if Triton is installed.

Results are rounded to the model's dtype at the same places as in the Hugging Face modules.
"""

# M tokens, N rows, S slots, H key/value heads, G query heads a key/value head, T positions, D head size, V vocabulary

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollbook.inference.engines.embedded.model.torch_ops import HeadShape

ATTEND_BLOCK, ATTEND_WARPS, ATTEND_STAGES = 64, 4, 3
"""Positions that a program reads at once, its warps, and its pipeline stages."""
SAMPLE_BLOCK = 4096
GATE_BLOCK = 1024


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, epsilon, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=is_in)


def launch_rms_norm(x_ME: Tensor, weight_E: Tensor, out_ME: Tensor, epsilon: float) -> None:
    width = x_ME.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x_ME),)](x_ME, weight_E, out_ME, epsilon, width, BLOCK=block, num_warps=4 if block <= 2048 else 8)


@triton.jit
def _rotate_and_store(
    fused_ptr, cosines_ptr, sines_ptr, positions_ptr, rows_ptr, write_at_ptr, joint_ptr,
    num_slots, length,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    at = tl.load(write_at_ptr + token).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    is_in = (heads < QUERIES + 2 * KEYS)[:, None] & (lanes < HALF)[None, :]
    first_ptr = fused_ptr + token * ((QUERIES + 2 * KEYS) * 2 * HALF) + heads[:, None] * (2 * HALF) + lanes[None, :]
    first_in = tl.load(first_ptr, mask=is_in, other=0.0)
    second_in = tl.load(first_ptr + HALF, mask=is_in, other=0.0)
    cosine = tl.load(cosines_ptr + position * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + position * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    is_rotated = (heads < QUERIES + KEYS)[:, None]
    rotated_first = tl.where(is_rotated, first * cosine - second * sine, first).to(first_in.dtype)
    rotated_second = tl.where(is_rotated, second * cosine + first * sine, second).to(first_in.dtype)
    tl.store(first_ptr, rotated_first, mask=is_in & is_rotated)
    tl.store(first_ptr + HALF, rotated_second, mask=is_in & is_rotated)
    # Heads after the queries: first all keys, then all values.
    kind = (heads - QUERIES) // KEYS
    head = (heads - QUERIES) % KEYS
    slot = ((kind.to(tl.int64) * num_slots + row) * KEYS + head) * length + at
    to_ptr = joint_ptr + slot[:, None] * (2 * HALF) + lanes[None, :]
    is_stored = is_in & (heads >= QUERIES)[:, None]
    tl.store(to_ptr, rotated_first, mask=is_stored)
    tl.store(to_ptr + HALF, rotated_second, mask=is_stored)


def launch_rotate_and_store(
    fused_MX: Tensor,
    cosines_TF: Tensor,
    sines_TF: Tensor,
    *,
    positions_M: Tensor,
    write_rows_M: Tensor,
    write_at_M: Tensor,
    joint: Tensor,
    heads: HeadShape,
) -> None:
    half = heads.size // 2
    _rotate_and_store[(len(fused_MX),)](
        fused_MX, cosines_TF, sines_TF, positions_M, write_rows_M, write_at_M, joint,
        joint.shape[1], joint.shape[3],
        QUERIES=heads.queries, KEYS=heads.keys, HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(heads.fused), HALF_BLOCK=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip


@triton.jit
def _attend_one(
    fused_ptr, joint_ptr, positions_ptr, out_ptr, partial_ptr, lse_ptr,
    scale, num_slots, length, splits,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(positions_ptr + row).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(count, splits), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(count, begin + share)
    group = tl.arange(0, GROUP_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    steps = tl.arange(0, BLOCK)
    is_query = (group < GROUP)[:, None] & (lanes < SIZE)[None, :]
    query_ptr = (
        fused_ptr + row * ((KEYS * GROUP + 2 * KEYS) * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
    )
    queries = tl.load(query_ptr, mask=is_query, other=0.0)
    keys_ptr = joint_ptr + (row * KEYS + head) * length * SIZE
    values_ptr = keys_ptr + (row * 0 + num_slots) * KEYS * length * SIZE
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        at = start + steps
        is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
        offsets = at[:, None] * SIZE + lanes[None, :]
        keys = tl.load(keys_ptr + offsets, mask=is_in, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where((at < end)[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_best[:, None])
        fade = tl.exp(best - new_best)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(values_ptr + offsets, mask=is_in, other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = new_best
    if IS_SPLIT:
        base = ((row * KEYS + head) * splits + split) * GROUP_BLOCK + group
        safe = tl.where(total > 0, total, 1.0)
        tl.store(lse_ptr + base, tl.where(total > 0, best + tl.log(safe), -float("inf")))
        part_ptr = partial_ptr + base[:, None] * SIZE_BLOCK + lanes[None, :]
        tl.store(part_ptr, sums / safe[:, None])
    else:
        to_ptr = out_ptr + row * (KEYS * GROUP * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
        tl.store(to_ptr, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, splits,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    head, member = query // GROUP, query % GROUP
    parts = tl.arange(0, SPLIT_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    base = ((row * KEYS + head) * splits + parts) * GROUP_BLOCK + member
    lse = tl.load(lse_ptr + base, mask=parts < splits, other=-float("inf"))
    weights = tl.exp(lse - tl.max(lse, axis=0))
    partial = tl.load(
        partial_ptr + base[:, None] * SIZE_BLOCK + lanes[None, :], mask=(parts < splits)[:, None], other=0.0
    )
    joined = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    to_ptr = out_ptr + row * (KEYS * GROUP * SIZE) + query * SIZE + lanes
    tl.store(to_ptr, joined.to(out_ptr.dtype.element_ty), mask=lanes < SIZE)


def launch_attend_one(
    fused_NX: Tensor, joint: Tensor, positions_N: Tensor, out_NX: Tensor, *, heads: HeadShape, splits: int
) -> None:
    count, size_block = len(fused_NX), max(16, triton.next_power_of_2(heads.size))
    # tl.dot needs at least sixteen rows.
    group_block = max(16, triton.next_power_of_2(heads.group))
    partial, lse = out_NX, out_NX
    if splits > 1:
        shape = (count, heads.keys, splits, group_block)
        lse = torch.empty(shape, dtype=torch.float32, device=out_NX.device)
        partial = torch.empty((*shape, size_block), dtype=torch.float32, device=out_NX.device)
    _attend_one[(count, heads.keys, splits)](
        fused_NX, joint, positions_N, out_NX, partial, lse,
        heads.size**-0.5, joint.shape[1], joint.shape[3], splits,
        KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size,
        GROUP_BLOCK=group_block, SIZE_BLOCK=size_block, BLOCK=ATTEND_BLOCK, IS_SPLIT=splits > 1,
        PRECISION="ieee" if fused_NX.dtype == torch.float32 else "tf32", num_warps=ATTEND_WARPS, num_stages=ATTEND_STAGES,
    )  # fmt: skip
    if splits > 1:
        _join_splits[(count, heads.queries)](
            partial, lse, out_NX, splits,
            KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size,
            GROUP_BLOCK=group_block, SIZE_BLOCK=size_block, SPLIT_BLOCK=triton.next_power_of_2(splits), num_warps=2,
        )  # fmt: skip


@triton.jit
def _gate(both_ptr, out_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gates = tl.load(both_ptr + token * 2 * width + columns, mask=is_in, other=0.0)
    ups = tl.load(both_ptr + token * 2 * width + width + columns, mask=is_in, other=0.0).to(tl.float32)
    wide = gates.to(tl.float32)
    passed = (wide / (1.0 + tl.exp(-wide))).to(gates.dtype).to(tl.float32)
    tl.store(out_ptr + token * width + columns, (passed * ups).to(out_ptr.dtype.element_ty), mask=is_in)


def launch_gate(both_MF: Tensor, out_MF: Tensor) -> None:
    width = out_MF.shape[1]
    block = min(GATE_BLOCK, triton.next_power_of_2(width))
    _gate[(len(out_MF), triton.cdiv(width, block))](both_MF, out_MF, width, BLOCK=block, num_warps=4)


@triton.jit
def _sample(
    logits_ptr, temperatures_ptr, keys_ptr, tokens_ptr, logprobs_ptr, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    is_greedy = temperature == 0.0
    cold = tl.minimum(1.0 / tl.where(is_greedy, 1.0, temperature), 1e37)
    key = tl.load(keys_ptr + row)
    lanes = tl.arange(0, BLOCK)
    # The largest logit is subtracted before scaling: a very small temperature must not overflow.
    peaks = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        at = start + lanes
        logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
        peaks = tl.maximum(peaks, logits)
    peak = tl.max(peaks, axis=0)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    best_scores = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    best_at = lanes
    for start in range(0, vocab_size, BLOCK):
        at = start + lanes
        is_in = at < vocab_size
        logits = tl.load(logits_ptr + row * vocab_size + at, mask=is_in, other=-float("inf")).to(tl.float32)
        scaled = (logits - peak) * cold
        totals += tl.where(is_in, tl.exp(scaled), 0.0)
        # An exponential variate, exact for small values, because those win. The offset keeps it above zero.
        uniform = tl.rand(key, at) + 2.3e-10
        waiting = tl.where(uniform < 1e-3, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
        noise = tl.where(is_greedy, 0.0, -tl.log(waiting))
        scores = tl.where(is_in, scaled + noise, -float("inf"))
        is_better = scores > best_scores
        best_scores = tl.where(is_better, scores, best_scores)
        best_at = tl.where(is_better, at, best_at)
    winner = tl.argmax(best_scores, axis=0)
    token = tl.sum(tl.where(lanes == winner, best_at, 0), axis=0)
    chosen = tl.load(logits_ptr + row * vocab_size + token).to(tl.float32)
    chosen = (chosen - peak) * cold
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, chosen - tl.log(tl.sum(totals, axis=0)))


def launch_sample(
    logits_NV: Tensor, temperatures_N: Tensor, keys_N: Tensor, tokens_N: Tensor, logprobs_N: Tensor
) -> None:
    vocab_size = logits_NV.shape[1]
    block = min(SAMPLE_BLOCK, triton.next_power_of_2(vocab_size))
    _sample[(len(logits_NV),)](
        logits_NV, temperatures_N, keys_N, tokens_N, logprobs_N, vocab_size, BLOCK=block, num_warps=8
    )
