"""The Triton kernels of a forward and their launch functions. Imported by `kernels.py` only, if Triton is installed.

Results are rounded to the model's dtype at the same places as in the Hugging Face modules.
"""

# M tokens, N rows, H key/value heads, G query heads a key/value head, T positions, D head size

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0915, PLR0917  # kernels are long and take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollbook.inference.engines.embedded.model.packed import PackedStep
from rollbook.inference.engines.embedded.model.torch_ops import HeadNorms, HeadShape

DECODE_TILE, DECODE_STAGES = 64, 3
"""Positions that an attention program reads at once, and its pipeline stages. Measured on an H200, as the numbers of warps."""
PREFILL_TILE, PREFILL_WARPS, PREFILL_STAGES = 64, 4, 3
QUERY_LINES = 64
"""Queries (tokens times the heads that share keys) of a program of prefill attention."""
LOG2_E = 1.4426950408889634
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
    fused_ptr, cosines_ptr, sines_ptr, rows_ptr, positions_ptr, tables_ptr, blocks_ptr, query_norm_ptr, key_norm_ptr,
    table_width, epsilon,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    if position < 0:
        return
    row = tl.load(rows_ptr + token).to(tl.int64)
    block = tl.load(tables_ptr + row * table_width + position // PAGE).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    is_in = (heads < QUERIES + 2 * KEYS)[:, None] & (lanes < HALF)[None, :]
    first_ptr = fused_ptr + token * ((QUERIES + 2 * KEYS) * 2 * HALF) + heads[:, None] * (2 * HALF) + lanes[None, :]
    first_in = tl.load(first_ptr, mask=is_in, other=0.0)
    second_in = tl.load(first_ptr + HALF, mask=is_in, other=0.0)
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    is_rotated = (heads < QUERIES + KEYS)[:, None]
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + epsilon)[:, None]
        is_query = (heads < QUERIES)[:, None]
        is_lane = lanes < HALF
        query_first = tl.load(query_norm_ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        query_second = tl.load(query_norm_ptr + HALF + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        key_first = tl.load(key_norm_ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        key_second = tl.load(key_norm_ptr + HALF + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        normed_first = (first * scale).to(first_in.dtype).to(tl.float32) * tl.where(is_query, query_first, key_first)
        normed_second = (second * scale).to(first_in.dtype).to(tl.float32) * tl.where(
            is_query, query_second, key_second
        )
        first = tl.where(is_rotated, normed_first.to(first_in.dtype).to(tl.float32), first)
        second = tl.where(is_rotated, normed_second.to(first_in.dtype).to(tl.float32), second)
    cosine = tl.load(cosines_ptr + position * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + position * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    rotated_first = tl.where(is_rotated, first * cosine - second * sine, first).to(first_in.dtype)
    rotated_second = tl.where(is_rotated, second * cosine + first * sine, second).to(first_in.dtype)
    tl.store(first_ptr, rotated_first, mask=is_in & is_rotated)
    tl.store(first_ptr + HALF, rotated_second, mask=is_in & is_rotated)
    # Heads after the queries: first all keys, then all values, as in a block.
    at = (block * (2 * KEYS) + (heads - QUERIES)) * PAGE + position % PAGE
    to_ptr = blocks_ptr + at[:, None] * (2 * HALF) + lanes[None, :]
    is_stored = is_in & (heads >= QUERIES)[:, None]
    tl.store(to_ptr, rotated_first, mask=is_stored)
    tl.store(to_ptr + HALF, rotated_second, mask=is_stored)


def launch_rotate_and_store(
    fused_MX: Tensor,
    cosines_TF: Tensor,
    sines_TF: Tensor,
    *,
    step: PackedStep,
    blocks: Tensor,
    heads: HeadShape,
    norms: HeadNorms | None,
) -> None:
    half = heads.size // 2
    query_norm, key_norm = (cosines_TF, cosines_TF) if norms is None else (norms.queries_D, norms.keys_D)
    _rotate_and_store[(len(fused_MX),)](
        fused_MX, cosines_TF, sines_TF, step.rows_M, step.positions_M, step.tables_SP, blocks, query_norm, key_norm,
        step.tables_SP.shape[1], 0.0 if norms is None else norms.epsilon,
        QUERIES=heads.queries, KEYS=heads.keys, HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(heads.fused), HALF_BLOCK=triton.next_power_of_2(half),
        PAGE=blocks.shape[3], HAS_NORMS=norms is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _attend_decode(
    fused_ptr, blocks_ptr, rows_ptr, positions_ptr, tables_ptr, num_decode_ptr, chunk_ptr, item_tokens_ptr, item_starts_ptr,
    out_ptr, partial_ptr, lse_ptr,
    scale, table_width,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    head = tl.program_id(1)
    token = item
    begin = 0
    if IS_SPLIT:
        token = tl.load(item_tokens_ptr + item)
        if token < 0:
            return
        begin = tl.load(item_starts_ptr + item)
    elif token >= tl.load(num_decode_ptr):
        return
    count = tl.load(positions_ptr + token) + 1
    end = count
    if IS_SPLIT:
        end = tl.minimum(count, begin + tl.load(chunk_ptr))
    table_ptr = tables_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_width
    group = tl.arange(0, GROUP_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    steps = tl.arange(0, TILE)
    is_query = (group < GROUP)[:, None] & (lanes < SIZE)[None, :]
    token = token.to(tl.int64)
    query_ptr = (
        fused_ptr + token * ((KEYS * GROUP + 2 * KEYS) * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
    )
    queries = tl.load(query_ptr, mask=is_query, other=0.0)
    keys_ptr = blocks_ptr + head * (PAGE * SIZE)
    values_ptr = keys_ptr + KEYS * PAGE * SIZE
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    for start in range(begin, end, TILE):
        at = start + steps
        is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
        if PAGE >= TILE:
            block = tl.load(table_ptr + start // PAGE).to(tl.int64) * (2 * KEYS * PAGE * SIZE)
            offsets = block + ((start % PAGE + steps) * SIZE)[:, None] + lanes[None, :]
        else:
            block = tl.load(table_ptr + at // PAGE, mask=at < end, other=0).to(tl.int64) * (2 * KEYS * PAGE * SIZE)
            offsets = (block + (at % PAGE) * SIZE)[:, None] + lanes[None, :]
        keys = tl.load(keys_ptr + offsets, mask=is_in, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where((at < end)[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(values_ptr + offsets, mask=is_in, other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = new_best
    if IS_SPLIT and (begin > 0 or end < count):
        base = (item.to(tl.int64) * KEYS + head) * GROUP_BLOCK + group
        tl.store(lse_ptr + base, best + tl.log2(total))
        tl.store(partial_ptr + base[:, None] * SIZE_BLOCK + lanes[None, :], sums / total[:, None])
    else:
        to_ptr = out_ptr + token * (KEYS * GROUP * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
        tl.store(to_ptr, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, positions_ptr, num_decode_ptr, chunk_ptr, first_items_ptr,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(num_decode_ptr):
        return
    parts = tl.cdiv(tl.load(positions_ptr + token) + 1, tl.load(chunk_ptr))
    if parts == 1:
        return
    first = tl.load(first_items_ptr + token).to(tl.int64)
    group = tl.arange(0, GROUP_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    for part in range(0, parts):
        base = ((first + part) * KEYS + head) * GROUP_BLOCK + group
        lse = tl.load(lse_ptr + base)
        new_best = tl.maximum(best, lse)
        fade = tl.exp2(best - new_best)
        weight = tl.exp2(lse - new_best)
        total = total * fade + weight
        sums = sums * fade[:, None] + weight[:, None] * tl.load(
            partial_ptr + base[:, None] * SIZE_BLOCK + lanes[None, :]
        )
        best = new_best
    to_ptr = (
        out_ptr + token.to(tl.int64) * (KEYS * GROUP * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
    )
    is_query = (group < GROUP)[:, None] & (lanes < SIZE)[None, :]
    tl.store(to_ptr, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _attend_tiles(
    fused_ptr, blocks_ptr, rows_ptr, positions_ptr, tables_ptr, tile_starts_ptr, tile_sizes_ptr, out_ptr,
    scale, table_width,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, QUERY_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    size = tl.load(tile_sizes_ptr + tile)
    if size == 0:
        return
    first = tl.load(tile_starts_ptr + tile)
    position = tl.load(positions_ptr + first)
    table_ptr = tables_ptr + tl.load(rows_ptr + first).to(tl.int64) * table_width
    # The queries of a token that share keys are neighbours.
    lines = tl.arange(0, QUERY_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    steps = tl.arange(0, TILE)
    tokens = lines // GROUP
    members = lines % GROUP
    is_query = (tokens < size)[:, None] & (lanes < SIZE)[None, :]
    at_token = (first + tokens).to(tl.int64)
    query_ptr = (
        fused_ptr + (at_token * (KEYS * GROUP + 2 * KEYS) + head * GROUP + members)[:, None] * SIZE + lanes[None, :]
    )
    queries = tl.load(query_ptr, mask=is_query, other=0.0)
    keys_ptr = blocks_ptr + head * (PAGE * SIZE)
    values_ptr = keys_ptr + KEYS * PAGE * SIZE
    best = tl.full((QUERY_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERY_BLOCK,), dtype=tl.float32)
    sums = tl.zeros((QUERY_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    end = position + size
    for start in range(0, end, TILE):
        at = start + steps
        is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
        if PAGE >= TILE:
            block = tl.load(table_ptr + start // PAGE).to(tl.int64) * (2 * KEYS * PAGE * SIZE)
            offsets = block + ((start % PAGE + steps) * SIZE)[:, None] + lanes[None, :]
        else:
            block = tl.load(table_ptr + at // PAGE, mask=at < end, other=0).to(tl.int64) * (2 * KEYS * PAGE * SIZE)
            offsets = (block + (at % PAGE) * SIZE)[:, None] + lanes[None, :]
        keys = tl.load(keys_ptr + offsets, mask=is_in, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(at[None, :] <= (position + tokens)[:, None], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(values_ptr + offsets, mask=is_in, other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = new_best
    to_ptr = out_ptr + (at_token * (KEYS * GROUP) + head * GROUP + members)[:, None] * SIZE + lanes[None, :]
    tl.store(to_ptr, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


def query_tile(heads: HeadShape) -> int:
    """Number of tokens in a tile of prefill attention."""
    return max(1, QUERY_LINES // heads.group)


def launch_attention(fused_MX: Tensor, step: PackedStep, blocks: Tensor, out_MX: Tensor, *, heads: HeadShape) -> None:
    """Decoding tokens first, then the tiles of prompts."""
    size_block = max(16, triton.next_power_of_2(heads.size))
    # tl.dot needs at least sixteen rows.
    group_block = max(16, triton.next_power_of_2(heads.group))
    table_width, page = step.tables_SP.shape[1], blocks.shape[3]
    # Exponentials to base two are faster.
    scale = heads.size**-0.5 * LOG2_E
    precision = "ieee" if fused_MX.dtype == torch.float32 else "tf32"
    num_rows = len(step.samples_N)
    items = len(step.item_tokens_W) if step.is_split else num_rows
    partial, lse = out_MX, out_MX
    if step.is_split:
        lse = torch.empty((items, heads.keys, group_block), dtype=torch.float32, device=out_MX.device)
        partial = torch.empty((*lse.shape, size_block), dtype=torch.float32, device=out_MX.device)
    _attend_decode[(items, heads.keys)](
        fused_MX, blocks, step.rows_M, step.positions_M, step.tables_SP, step.num_decode_1, step.chunk_1,
        step.item_tokens_W, step.item_starts_W, out_MX, partial, lse,
        scale, table_width,
        KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, GROUP_BLOCK=group_block, SIZE_BLOCK=size_block,
        PAGE=page, TILE=DECODE_TILE, IS_SPLIT=step.is_split, PRECISION=precision,
        num_warps=2 if size_block <= 64 else 4, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if step.is_split:
        _join_splits[(num_rows, heads.keys)](
            partial, lse, out_MX, step.positions_M, step.num_decode_1, step.chunk_1, step.first_items_N,
            KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, GROUP_BLOCK=group_block, SIZE_BLOCK=size_block,
            num_warps=2,
        )  # fmt: skip
    if len(step.tile_sizes_K):
        _attend_tiles[(len(step.tile_sizes_K), heads.keys)](
            fused_MX, blocks, step.rows_M, step.positions_M, step.tables_SP, step.tile_starts_K, step.tile_sizes_K, out_MX,
            scale, table_width,
            KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, SIZE_BLOCK=size_block,
            QUERY_BLOCK=max(16, triton.next_power_of_2(query_tile(heads) * heads.group)),
            PAGE=page, TILE=PREFILL_TILE, PRECISION=precision, num_warps=PREFILL_WARPS, num_stages=PREFILL_STAGES,
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
