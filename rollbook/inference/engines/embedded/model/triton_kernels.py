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

from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.packed import PackedStep
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape
from rollbook.numerics.recipe import Attention, Rotary
from rollbook.numerics.triton_attention import (
    KEY_BLOCK,
    LOG2_E,
    attend_block,
    first_key,
    is_in_window,
    join_chunk,
    launch_with_stages,
    mean_of_chunk,
    with_sink,
)

QUERY_LINES, PREFILL_WARPS = 64, 4
"""Queries (tokens times the heads that share keys) and warps of a program of prefill attention; measured on an H200."""


@triton.jit
def _byte_numbers(scaled, stored: tl.constexpr):
    if stored == tl.uint8:
        numbers = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        numbers = tl.minimum(tl.floor(scaled + 0.5), 127.0).to(tl.int8)
    return numbers


@triton.jit
def _rotate_and_store(
    fused_ptr, cosines_ptr, sines_ptr, scales_ptr, rows_ptr, positions_ptr, tables_ptr, blocks_ptr,
    table_width,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, ANGLES: tl.constexpr, IS_PAIRED: tl.constexpr, HAS_SCALES: tl.constexpr, IS_STORED: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    if position < 0:
        return
    heads = tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    # The places of a pair of numbers: with halves, numbers that are not rotated form pairs of neighbours.
    first_at, second_at = lanes, lanes + HALF
    if IS_PAIRED:
        first_at, second_at = 2 * lanes, 2 * lanes + 1
    elif ANGLES < HALF:
        first_at = tl.where(lanes < ANGLES, lanes, 2 * lanes)
        second_at = tl.where(lanes < ANGLES, lanes + ANGLES, 2 * lanes + 1)
    is_in = (heads < QUERIES + 2 * KEYS)[:, None] & (lanes < HALF)[None, :]
    head_ptr = fused_ptr + token * ((QUERIES + 2 * KEYS) * 2 * HALF) + heads[:, None] * (2 * HALF)
    rotated_first = tl.load(head_ptr + first_at[None, :], mask=is_in, other=0.0)
    rotated_second = tl.load(head_ptr + second_at[None, :], mask=is_in, other=0.0)
    if ANGLES > 0:
        kind = rotated_first.dtype
        first, second = rotated_first.to(tl.float32), rotated_second.to(tl.float32)
        is_rotated = is_in & (heads < QUERIES + KEYS)[:, None] & (lanes < ANGLES)[None, :]
        cosine = tl.load(cosines_ptr + position * ANGLES + lanes, mask=lanes < ANGLES, other=0.0)
        sine = tl.load(sines_ptr + position * ANGLES + lanes, mask=lanes < ANGLES, other=0.0)
        # Products are rounded as in the Hugging Face modules: to the type of the tables.
        product = cosine.dtype
        cosine, sine = cosine.to(tl.float32)[None, :], sine.to(tl.float32)[None, :]
        turned_first = (first * cosine).to(product).to(tl.float32) - (second * sine).to(product).to(tl.float32)
        turned_second = (second * cosine).to(product).to(tl.float32) + (first * sine).to(product).to(tl.float32)
        if HAS_SCALES:
            scale = tl.load(scales_ptr + position).to(tl.float32)
            is_query = (heads < QUERIES)[:, None]
            turned_first = tl.where(is_query, turned_first.to(kind).to(tl.float32) * scale, turned_first)
            turned_second = tl.where(is_query, turned_second.to(kind).to(tl.float32) * scale, turned_second)
        rotated_first = tl.where(is_rotated, turned_first, first).to(kind)
        rotated_second = tl.where(is_rotated, turned_second, second).to(kind)
        tl.store(head_ptr + first_at[None, :], rotated_first, mask=is_rotated)
        tl.store(head_ptr + second_at[None, :], rotated_second, mask=is_rotated)
    if IS_STORED:
        row = tl.load(rows_ptr + token).to(tl.int64)
        block = tl.load(tables_ptr + row * table_width + position // PAGE).to(tl.int64)
        # Heads after the queries: first all keys, then all values, as in a block.
        page_ptr = blocks_ptr + (block * (2 * KEYS) + (heads - QUERIES)) * (PAGE * (2 * HALF + (LARGEST > 0)))
        to_ptr = page_ptr[:, None] + position % PAGE * (2 * HALF)
        is_kept = (heads >= QUERIES) & (heads < QUERIES + 2 * KEYS)
        is_stored = is_in & is_kept[:, None]
        if LARGEST > 0:
            # As in `eight_bits.encoded`.
            stored: tl.constexpr = blocks_ptr.dtype.element_ty
            largest = tl.max(tl.maximum(tl.abs(rotated_first), tl.abs(rotated_second)).to(tl.float32), axis=1)
            exponents = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8), 254)
            tl.store(
                page_ptr + PAGE * (2 * HALF) + position % PAGE,
                exponents.to(tl.uint8).to(stored, bitcast=True),
                mask=is_kept,
            )
            scales = ((254 + LARGEST - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
            rotated_first = _byte_numbers(rotated_first.to(tl.float32) * scales, stored)
            rotated_second = _byte_numbers(rotated_second.to(tl.float32) * scales, stored)
        tl.store(to_ptr + first_at[None, :], rotated_first, mask=is_stored)
        tl.store(to_ptr + second_at[None, :], rotated_second, mask=is_stored)


def launch_rotate_and_store(
    fused_MX: Tensor, rotary: Rotary | None, *, step: PackedStep, blocks: Tensor | None, heads: HeadShape
) -> None:
    """`rotary`: None if nothing is rotated. `blocks`: None if nothing is stored."""
    half = heads.size // 2
    scales = None if rotary is None else rotary.query_scales_T
    # A tensor that is not read takes the place of one that is not there.
    cosines, sines = (fused_MX, fused_MX) if rotary is None else (rotary.cosines_TF, rotary.sines_TF)
    _rotate_and_store[(len(fused_MX),)](
        fused_MX, cosines, sines, fused_MX if scales is None else scales, step.rows_M, step.positions_M, step.tables_SP,
        fused_MX if blocks is None else blocks, step.tables_SP.shape[1],
        QUERIES=heads.queries, KEYS=heads.keys, HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(heads.fused), HALF_BLOCK=triton.next_power_of_2(half),
        PAGE=1 if blocks is None else blocks.shape[3], ANGLES=0 if rotary is None else rotary.width // 2,
        IS_PAIRED=rotary is not None and rotary.is_paired, HAS_SCALES=scales is not None, IS_STORED=blocks is not None,
        LARGEST=0 if blocks is None else eight_bits.LARGEST.get(blocks.dtype, 0),
        num_warps=4,
        # Fused into one operation, products would not be rounded.
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _vectors(
    page_ptr, steps, lanes, is_key, is_in, kind: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Keys or values, at `steps` of their pages."""
    vectors = tl.load((page_ptr + steps * SIZE)[:, None] + lanes[None, :], mask=is_in, other=0)
    if LARGEST > 0:
        # As in `eight_bits.decoded`.
        exponents = tl.load(page_ptr + PAGE * SIZE + steps, mask=is_key, other=127).to(tl.uint8, bitcast=True)
        scales = ((exponents.to(tl.int32) - LARGEST) << 23).to(tl.float32, bitcast=True)
        if vectors.dtype == tl.uint8:
            vectors = vectors.to(tl.float8e4nv, bitcast=True)
        vectors = vectors.to(kind) * scales.to(kind)[:, None]
    return vectors


@triton.jit
def _attend_decode(
    fused_ptr, blocks_ptr, rows_ptr, positions_ptr, tables_ptr, num_decode_ptr, chunk_ptr, item_tokens_ptr, item_starts_ptr,
    out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    scale, table_width,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, HAS_SINKS: tl.constexpr, LARGEST: tl.constexpr,
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
    position = tl.load(positions_ptr + token)
    count = position + 1
    end = count
    if IS_SPLIT:
        end = tl.minimum(count, begin + tl.load(chunk_ptr))
    lowest = 0
    if WINDOW > 0:
        lowest = first_key(position, WINDOW, TILE)
        if end <= lowest:
            return
    is_part = begin > lowest or end < count
    if WINDOW > 0:
        begin = tl.maximum(lowest, begin)
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
    LINES: tl.constexpr = PAGE * (SIZE + (LARGEST > 0))
    keys_ptr = blocks_ptr + head * LINES
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK, 16), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    for start in range(begin, end, TILE):
        at = start + steps
        is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
        if PAGE >= TILE:
            page_ptr = keys_ptr + tl.load(table_ptr + start // PAGE).to(tl.int64) * (2 * KEYS * LINES)
            places = start % PAGE + steps
        else:
            block = tl.load(table_ptr + at // PAGE, mask=at < end, other=0)
            page_ptr = keys_ptr + block.to(tl.int64) * (2 * KEYS * LINES)
            places = at % PAGE
        keys = _vectors(page_ptr, places, lanes, at < end, is_in, queries.dtype, SIZE, PAGE, LARGEST)
        values = _vectors(page_ptr + KEYS * LINES, places, lanes, at < end, is_in, queries.dtype, SIZE, PAGE, LARGEST)
        is_seen = ((at < end) & is_in_window(at, position, WINDOW))[None, :]
        best, total, sums = attend_block(queries, keys, values, is_seen, scale, best, total, sums, PRECISION, CAP)
    weight, mean = mean_of_chunk(best, total, sums)
    if IS_SPLIT and is_part:
        base = (item.to(tl.int64) * KEYS + head) * GROUP + group
        tl.store(lse_ptr + base, weight, mask=group < GROUP)
        tl.store(partial_ptr + base[:, None] * SIZE + lanes[None, :], mean, mask=is_query)
    else:
        mean = with_sink(mean, weight, sinks_ptr, head * GROUP + group, group < GROUP, HAS_SINKS)
        to_ptr = out_ptr + token * (KEYS * GROUP * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
        tl.store(to_ptr, mean.to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, positions_ptr, num_decode_ptr, chunk_ptr, first_items_ptr, sinks_ptr,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(num_decode_ptr):
        return
    position, chunk = tl.load(positions_ptr + token), tl.load(chunk_ptr)
    parts = tl.cdiv(position + 1, chunk)
    first_part = 0
    if WINDOW > 0:
        # Parts before the window were not computed.
        first_part = first_key(position, WINDOW, TILE) // chunk
    if parts - first_part == 1:
        return
    first = tl.load(first_items_ptr + token).to(tl.int64)
    group = tl.arange(0, GROUP_BLOCK)
    lanes = tl.arange(0, SIZE_BLOCK)
    best = tl.full((GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
    sums = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    is_query = (group < GROUP)[:, None] & (lanes < SIZE)[None, :]
    for part in range(first_part, parts):
        base = ((first + part) * KEYS + head) * GROUP + group
        mean = tl.load(partial_ptr + base[:, None] * SIZE + lanes[None, :], mask=is_query, other=0.0)
        weight = tl.load(lse_ptr + base, mask=group < GROUP, other=0.0)
        best, total, sums = join_chunk(weight, mean, best, total, sums)
    to_ptr = (
        out_ptr + token.to(tl.int64) * (KEYS * GROUP * SIZE) + (head * GROUP + group)[:, None] * SIZE + lanes[None, :]
    )
    weight, mean = best + tl.log2(total), sums / total[:, None]
    mean = with_sink(mean, weight, sinks_ptr, head * GROUP + group, group < GROUP, HAS_SINKS)
    tl.store(to_ptr, mean.to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _attend_tiles(
    fused_ptr, blocks_ptr, rows_ptr, positions_ptr, tables_ptr, tile_starts_ptr, tile_sizes_ptr, out_ptr, sinks_ptr,
    scale, table_width,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, QUERY_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, HAS_SINKS: tl.constexpr, LARGEST: tl.constexpr,
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
    LINES: tl.constexpr = PAGE * (SIZE + (LARGEST > 0))
    keys_ptr = blocks_ptr + head * LINES
    all_best = tl.full((QUERY_BLOCK,), -float("inf"), dtype=tl.float32)
    all_total = tl.zeros((QUERY_BLOCK,), dtype=tl.float32)
    all_sums = tl.zeros((QUERY_BLOCK, SIZE_BLOCK), dtype=tl.float32)
    end = position + size
    lowest = 0
    if WINDOW > 0:
        lowest = first_key(position, WINDOW, TILE)
    for begin in range(lowest // CHUNK * CHUNK, end, CHUNK):
        best = tl.full((QUERY_BLOCK,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((QUERY_BLOCK, 16), dtype=tl.float32)
        sums = tl.zeros((QUERY_BLOCK, SIZE_BLOCK), dtype=tl.float32)
        low = begin
        if WINDOW > 0:
            low = tl.maximum(begin, lowest)
        for start in range(low, tl.minimum(end, begin + CHUNK), TILE):
            at = start + steps
            is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
            if PAGE >= TILE:
                page_ptr = keys_ptr + tl.load(table_ptr + start // PAGE).to(tl.int64) * (2 * KEYS * LINES)
                places = start % PAGE + steps
            else:
                block = tl.load(table_ptr + at // PAGE, mask=at < end, other=0)
                page_ptr = keys_ptr + block.to(tl.int64) * (2 * KEYS * LINES)
                places = at % PAGE
            keys = _vectors(page_ptr, places, lanes, at < end, is_in, queries.dtype, SIZE, PAGE, LARGEST)
            values = _vectors(
                page_ptr + KEYS * LINES, places, lanes, at < end, is_in, queries.dtype, SIZE, PAGE, LARGEST
            )
            is_seen = is_in_window(at[None, :], (position + tokens)[:, None], WINDOW)
            best, total, sums = attend_block(queries, keys, values, is_seen, scale, best, total, sums, PRECISION, CAP)
        weight, mean = mean_of_chunk(best, total, sums)
        all_best, all_total, all_sums = join_chunk(weight, mean, all_best, all_total, all_sums)
    to_ptr = out_ptr + (at_token * (KEYS * GROUP) + head * GROUP + members)[:, None] * SIZE + lanes[None, :]
    all_weight, all_mean = all_best + tl.log2(all_total), all_sums / all_total[:, None]
    mean = with_sink(all_mean, all_weight, sinks_ptr, head * GROUP + members, members < GROUP, HAS_SINKS)
    tl.store(to_ptr, mean.to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _scaled_lines(
    x_ptr, numbers_ptr, scales_ptr, width, stride, BLOCK: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    x = tl.load(x_ptr + line * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, LEAST)
    tl.store(scales_ptr + line, scale)
    tl.store(numbers_ptr + line * width + columns, (x / scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=is_in)


def launch_scaled_lines(x_ME: Tensor) -> eight_bits.Scaled:
    """Computes what `eight_bits.scaled_lines` computes."""
    lines, width = x_ME.shape
    block = triton.next_power_of_2(width)
    numbers_ME = torch.empty((lines, width), dtype=torch.uint8, device=x_ME.device)
    scales_M1 = torch.empty((lines, 1), dtype=torch.float32, device=x_ME.device)
    _scaled_lines[(lines,)](
        x_ME, numbers_ME, scales_M1, width, x_ME.stride(0),
        BLOCK=block, LARGEST=eight_bits.FP8_LARGEST, LEAST=eight_bits.SMALLEST_SCALE,
        num_warps=4 if block <= 2048 else 8, enable_fp_fusion=True,
    )  # fmt: skip
    return numbers_ME.view(torch.float8_e4m3fn), scales_M1


def query_tile(heads: HeadShape) -> int:
    """Number of tokens in a tile of prefill attention."""
    return max(1, QUERY_LINES // heads.group)


def launch_attention(
    fused_MX: Tensor, step: PackedStep, blocks: Tensor, out_MX: Tensor, *, heads: HeadShape, of: Attention, chunk: int
) -> None:
    """Decoding tokens first, then the tiles of prompts. `chunk`: of prompts."""
    size_block = max(16, triton.next_power_of_2(heads.size))
    # tl.dot needs at least sixteen rows.
    group_block = max(16, triton.next_power_of_2(heads.group))
    table_width, page = step.tables_SP.shape[1], blocks.shape[3]
    scale, cap, window = of.scale * LOG2_E, (of.cap or 0.0) * LOG2_E, of.window or 0
    # A tensor that is not read takes the place of one that is not there.
    sinks, has_sinks = (out_MX, False) if of.sinks_R is None else (of.sinks_R, True)
    precision = "ieee" if fused_MX.dtype == torch.float32 else "tf32"
    num_rows, largest = len(step.samples_N), eight_bits.LARGEST.get(blocks.dtype, 0)
    items = len(step.item_tokens_W) if step.is_split else num_rows
    partial, lse = out_MX, out_MX
    if step.is_split:
        lse = torch.empty((items, heads.keys, heads.group), dtype=torch.float32, device=out_MX.device)
        partial = torch.empty((*lse.shape, heads.size), dtype=torch.float32, device=out_MX.device)
    launch_with_stages(
        _attend_decode, (items, heads.keys),
        fused_MX, blocks, step.rows_M, step.positions_M, step.tables_SP, step.num_decode_1, step.chunk_1,
        step.item_tokens_W, step.item_starts_W, out_MX, partial, lse, sinks,
        scale, table_width,
        KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, GROUP_BLOCK=group_block, SIZE_BLOCK=size_block,
        PAGE=page, TILE=KEY_BLOCK, IS_SPLIT=step.is_split, PRECISION=precision, WINDOW=window, CAP=cap,
        HAS_SINKS=has_sinks, LARGEST=largest,
        num_warps=2 if size_block <= 64 else 4,
    )  # fmt: skip
    if step.is_split:
        _join_splits[(num_rows, heads.keys)](
            partial, lse, out_MX, step.positions_M, step.num_decode_1, step.chunk_1, step.first_items_N, sinks,
            KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, GROUP_BLOCK=group_block, SIZE_BLOCK=size_block,
            TILE=KEY_BLOCK, WINDOW=window, HAS_SINKS=has_sinks, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
    if len(step.tile_sizes_K):
        launch_with_stages(
            _attend_tiles, (len(step.tile_sizes_K), heads.keys),
            fused_MX, blocks, step.rows_M, step.positions_M, step.tables_SP, step.tile_starts_K, step.tile_sizes_K, out_MX,
            sinks, scale, table_width,
            KEYS=heads.keys, GROUP=heads.group, SIZE=heads.size, SIZE_BLOCK=size_block,
            QUERY_BLOCK=max(16, triton.next_power_of_2(query_tile(heads) * heads.group)),
            PAGE=page, TILE=KEY_BLOCK, CHUNK=chunk, PRECISION=precision, WINDOW=window, CAP=cap,
            HAS_SINKS=has_sinks, LARGEST=largest,
            num_warps=PREFILL_WARPS,
        )  # fmt: skip
