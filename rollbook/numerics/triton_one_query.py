"""Attention of one query a row, over keys and values as views, and its launch function. Imported by
`module_kernels.py` of the embedded engine only, if Triton is installed.

A program computes all query heads of a key head, over a part of the positions. It reads the mask first, and then only the blocks of
keys from the first visible position to the last one: padding costs nothing. Parts are joined in order.
"""

# N rows, H key/value heads, G query heads a key/value head, R = H x G, T positions, D key size, V value size, P parts

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollbook.numerics.triton_attention import (
    KEY_BLOCK,
    LOG2_E,
    LOG2E,
    add_scores,
    join_chunk,
    launch_with_stages,
    mean_of_chunk,
)

PROGRAMS = 512
"""Rows are split until a launch has so many programs: a few for each multiprocessor of a large GPU."""
LEAST_KEYS, MOST_PARTS = 256, 32
SCAN = 512
"""Positions of the mask that a program reads at once."""
JOINED_LINES = 16


def parts_of(programs: int, length: int) -> tuple[int, int]:
    """How many programs share the positions of a row, and how many positions each has at most. Depends on shapes only, so captured
    steps repeat it."""
    wanted = min(triton.cdiv(PROGRAMS, programs), triton.cdiv(length, LEAST_KEYS), MOST_PARTS)
    size = triton.cdiv(triton.cdiv(length, wanted), KEY_BLOCK) * KEY_BLOCK
    return triton.cdiv(length, size), size


@triton.jit
def _visible(mask_ptr, stride, at, is_in, lowest, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, IS_ADDED: tl.constexpr):
    """Which of the positions at `at` are visible, and what is added to their scores."""
    is_seen = is_in
    added = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_MASK:
        numbers = tl.load(mask_ptr + at.to(tl.int64) * stride, mask=is_in, other=0)
        if IS_ADDED:
            added = numbers.to(tl.float32)
            is_seen = is_in & (added > lowest)
            added = added * LOG2E
        else:
            is_seen = is_in & (numbers != 0)
    return is_seen, added


@triton.jit(do_not_specialize=["length", "part_size", "lines"])
def _attend_one(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, partial_ptr, weight_ptr,
    length, part_size, lines, scale, lowest,
    query_row, query_head, query_lane, key_row, key_head, key_step, key_lane,
    value_row, value_head, value_step, value_lane, mask_row, mask_step,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_ADDED: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    group = tl.arange(0, GROUP_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    value_lanes = tl.arange(0, VALUE_BLOCK)
    steps = tl.arange(0, BLOCK)
    begin = part * part_size
    end = tl.minimum(length, begin + part_size)
    row_mask_ptr = mask_ptr + row * mask_row
    low, high = begin, end
    if HAS_MASK:
        # A part that is hidden as a whole has no block.
        low, high = end, begin
        scanned = tl.arange(0, SCAN)
        for start in range(begin, end, SCAN):
            at = start + scanned
            is_seen, _ = _visible(row_mask_ptr, mask_step, at, at < end, lowest, SCAN, HAS_MASK, IS_ADDED)
            low = tl.minimum(low, tl.min(tl.where(is_seen, at, end), axis=0))
            high = tl.maximum(high, tl.max(tl.where(is_seen, at + 1, begin), axis=0))
        low = low // BLOCK * BLOCK
    is_query = (group < GROUP)[:, None] & (lanes < SIZE)[None, :]
    heads = head * GROUP + group
    queries = tl.load(
        query_ptr + row * query_row + heads[:, None] * query_head + lanes[None, :] * query_lane,
        mask=is_query,
        other=0.0,
    )
    keys_ptr = key_ptr + row * key_row + head * key_head + lanes[None, :] * key_lane
    values_ptr = value_ptr + row * value_row + head * value_head + value_lanes[None, :] * value_lane
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK, 16), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, VALUE_BLOCK), dtype=tl.float32)
    for start in range(low, high, BLOCK):
        at = start + steps
        is_seen, added = _visible(row_mask_ptr, mask_step, at, at < high, lowest, BLOCK, HAS_MASK, IS_ADDED)
        # Hidden positions may hold anything, also what is not a number.
        is_key = is_seen[:, None] & (lanes < SIZE)[None, :]
        is_value = is_seen[:, None] & (value_lanes < VALUE_SIZE)[None, :]
        keys = tl.load(keys_ptr + at[:, None].to(tl.int64) * key_step, mask=is_key, other=0.0)
        values = tl.load(values_ptr + at[:, None].to(tl.int64) * value_step, mask=is_value, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + added[None, :]
        best, total, sums = add_scores(scores, values, is_seen[None, :], best, total, sums, PRECISION)
    weight, mean = mean_of_chunk(best, total, sums)
    line = (row * KEYS + head) * GROUP + group
    is_out = (group < GROUP)[:, None] & (value_lanes < VALUE_SIZE)[None, :]
    if IS_SPLIT:
        line += part.to(tl.int64) * lines
        tl.store(weight_ptr + line, weight, mask=group < GROUP)
        tl.store(partial_ptr + line[:, None] * VALUE_SIZE + value_lanes[None, :], mean, mask=is_out)
    else:
        to_ptr = out_ptr + line[:, None] * VALUE_SIZE + value_lanes[None, :]
        tl.store(to_ptr, mean.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["lines", "parts"])
def _join_parts(
    partial_ptr, weight_ptr, out_ptr, lines, parts,
    VALUE_SIZE: tl.constexpr, VALUE_BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    lanes = tl.arange(0, VALUE_BLOCK)
    is_in = (line < lines)[:, None] & (lanes < VALUE_SIZE)[None, :]
    best = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    sums = tl.zeros((LINES, VALUE_BLOCK), dtype=tl.float32)
    for part in range(0, parts):
        at = line + part * lines
        mean = tl.load(partial_ptr + at[:, None] * VALUE_SIZE + lanes[None, :], mask=is_in, other=0.0)
        weight = tl.load(weight_ptr + at, mask=line < lines, other=0.0)
        best, total, sums = join_chunk(weight, mean, best, total, sums)
    # A row whose positions are all hidden gets zeros, as from torch.
    joined = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + line[:, None] * VALUE_SIZE + lanes[None, :], joined.to(out_ptr.dtype.element_ty), mask=is_in)


def launch_one_query(
    query_NRD: Tensor, key_NHTD: Tensor, value_NHTV: Tensor, mask_NT: Tensor | None, out_NRV: Tensor, *, scale: float
) -> None:
    """`mask_NT`: what is added to scores, or which positions are visible. All but the result may have any strides."""
    rows, heads, size = query_NRD.shape
    keys, length, value_size = value_NHTV.shape[1:]
    group = heads // keys
    size_block, value_block = (max(16, triton.next_power_of_2(wide)) for wide in (size, value_size))
    parts, part_size = parts_of(rows * keys, length)
    lines, is_split = rows * heads, parts > 1
    partial, weights = out_NRV, out_NRV
    if is_split:
        weights = torch.empty((parts, lines), dtype=torch.float32, device=out_NRV.device)
        partial = torch.empty((parts, lines, value_size), dtype=torch.float32, device=out_NRV.device)
    is_added = mask_NT is not None and mask_NT.dtype != torch.bool
    # The smallest number of the model's type hides a position as minus infinity does: transformers uses both.
    lowest = torch.finfo(mask_NT.dtype).min if mask_NT is not None and is_added else 0.0
    # A tensor that is not read takes the place of one that is not there.
    mask, mask_strides = (out_NRV, (0, 0)) if mask_NT is None else (mask_NT, mask_NT.stride())
    launch_with_stages(
        _attend_one, (rows, keys, parts),
        query_NRD, key_NHTD, value_NHTV, mask.view(torch.uint8) if mask.dtype == torch.bool else mask, out_NRV, partial,
        weights, length, part_size, lines, scale * LOG2_E, lowest,
        *query_NRD.stride(), *key_NHTD.stride(), *value_NHTV.stride(), *mask_strides,
        KEYS=keys, GROUP=group, SIZE=size, VALUE_SIZE=value_size,
        # tl.dot needs at least sixteen rows.
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)), SIZE_BLOCK=size_block, VALUE_BLOCK=value_block,
        BLOCK=KEY_BLOCK, SCAN=SCAN, HAS_MASK=mask_NT is not None, IS_ADDED=is_added, IS_SPLIT=is_split,
        PRECISION="ieee" if query_NRD.dtype == torch.float32 else "tf32",
        num_warps=2 if max(size_block, value_block) <= 64 else 4,
    )  # fmt: skip
    if is_split:
        _join_parts[(triton.cdiv(lines, JOINED_LINES),)](
            partial, weights, out_NRV, lines, parts,
            VALUE_SIZE=value_size, VALUE_BLOCK=value_block, LINES=JOINED_LINES, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
