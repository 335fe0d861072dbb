"""Causal attention over packed sequences, and the steps that every attention kernel of sampler and trainer consists of.

Keys are added in blocks of 64 from the start of the sequence. All sums are matrix products, also that of the weights, so that their
order depends neither on the number of queries of a program nor on that of its warps: on an H200 the bits are the same for 16 to 128
queries, one to eight warps, and `mma` and `wgmma` instructions. Long rows are computed in chunks of keys, which different programs
may compute, and joined in order.
"""

# T tokens, F tokens of all sequences with shared ones repeated, H heads, K heads of keys and values, D head size, B tiles

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

KEY_BLOCK = 64
STAGES = 3
"""Blocks of keys that a program loads ahead; measured on an H200. Where they do not fit in a program's memory, fewer."""
LOG2_E = 1.4426950408889634
LOG2E = tl.constexpr(LOG2_E)


_fitting_stages: dict[tuple[Any, ...], int] = {}


def launch_with_stages(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch with as many stages as fit in the shared memory of the device: large heads need more than small GPUs have.

    The number of stages changes no bit of the result. Fusing products and sums does: Triton's default will change.
    """
    kind = (kernel, args[0].device, args[0].dtype, *options.values())
    for stages in range(_fitting_stages.get(kind, STAGES), 0, -1):
        try:
            kernel[grid](*args, **options, num_stages=stages, enable_fp_fusion=True)
        except triton.OutOfResources:
            if stages == 1:
                raise
        else:
            _fitting_stages[kind] = stages
            return


@triton.jit
def attend_block(queries, keys, values, is_seen, scale, best, total, sums, PRECISION: tl.constexpr, CAP: tl.constexpr):
    """Add a block of keys and values. `best`: the largest score so far, `total`: sums of weights, `sums`: of weighted values.

    `total` has 16 equal columns, the fewest that a matrix product gives. `scale` and `CAP` (of the scores; 0: none) are times
    log2 e, because exponentials to base two are faster.
    """
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if CAP > 0.0:
        # cap x tanh(score / cap)
        scores = CAP - 2.0 * CAP / (1.0 + tl.exp(scores * (2.0 / CAP)))
    best, total, sums = add_scores(scores, values, is_seen, best, total, sums, PRECISION)
    return best, total, sums


@triton.jit
def add_scores(scores, values, is_seen, best, total, sums, PRECISION: tl.constexpr):
    """The second half of `attend_block`, for scores times log2 e."""
    scores = tl.where(is_seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A query that sees none of the keys of a chunk.
    base = tl.where(new_best == -float("inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None]).to(values.dtype)
    fade = tl.exp2(best - base)
    ones = tl.full((values.shape[0], 16), 1.0, dtype=values.dtype)
    total = total * fade[:, None] + tl.dot(weights, ones, input_precision=PRECISION)
    sums = sums * fade[:, None] + tl.dot(weights, values, input_precision=PRECISION)
    return new_best, total, sums


@triton.jit
def first_key(position, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Where reading begins for the token at `position`: at the block of the sequence in which its window starts."""
    return tl.maximum(position + 1 - WINDOW, 0) // BLOCK * BLOCK


@triton.jit
def is_in_window(at, positions, WINDOW: tl.constexpr):
    """Which of the keys at `at` are seen. `WINDOW`: 0 for none."""
    is_seen = at <= positions
    if WINDOW > 0:
        is_seen = is_seen & (at > positions - WINDOW)
    return is_seen


@triton.jit
def join_chunk(weight_of_chunk, values_of_chunk, best, total, sums):
    """Add a chunk: the logarithm of its sum of weights (minus infinity: it has no keys), and its mean of values."""
    new_best = tl.maximum(best, weight_of_chunk)
    # The first chunks may have none of a query's keys: its window starts later.
    base = tl.where(new_best == -float("inf"), 0.0, new_best)
    fade = tl.exp2(best - base)
    weight = tl.exp2(weight_of_chunk - base)
    total = tl.fma(total, fade, weight)
    sums = tl.fma(sums, fade[:, None] + tl.zeros_like(sums), weight[:, None] * values_of_chunk)
    return new_best, total, sums


@triton.jit
def mean_of_chunk(best, total, sums):
    """What `join_chunk` takes."""
    # The columns are equal.
    found = tl.max(total, axis=1)
    is_any = found > 0.0
    whole = tl.where(is_any, found, 1.0)
    return tl.where(is_any, best + tl.log2(whole), -float("inf")), sums / whole[:, None]


@triton.jit
def with_sink(mean, weight, sinks_ptr, heads, is_head, HAS_SINKS: tl.constexpr):
    """A mean of values, when the sinks of its heads take their part of the weights. `weight`: the logarithm of their sum so far."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        mean = mean / (1.0 + tl.exp2(sinks - weight))[:, None]
    return mean


@triton.jit(do_not_specialize=["num_tiles"])  # as in `triton_rows`
def _attend_packed(
    query_ptr, key_ptr, value_ptr, out_ptr, tiles_ptr, num_tiles, scale,
    query_stride, key_stride, value_stride,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles_ptr + tile).to(tl.int64)
    size = tl.load(tiles_ptr + num_tiles + tile)
    position = tl.load(tiles_ptr + 2 * num_tiles + tile)
    first_at = tl.load(tiles_ptr + 3 * num_tiles + tile).to(tl.int64)
    # The queries of a token that share keys are neighbours.
    lines = tl.arange(0, LINES)
    lanes = tl.arange(0, SIZE_BLOCK)
    steps = tl.arange(0, BLOCK)
    tokens = lines // GROUP
    heads = head * GROUP + lines % GROUP
    is_query = (tokens < size)[:, None] & (lanes < SIZE)[None, :]
    at_token = first + tokens
    queries = tl.load(
        query_ptr + at_token[:, None] * query_stride + (heads * SIZE)[:, None] + lanes[None, :],
        mask=is_query,
        other=0.0,
    )
    keys_ptr = key_ptr + first_at * key_stride + head * SIZE + lanes[None, :]
    values_ptr = value_ptr + first_at * value_stride + head * SIZE + lanes[None, :]
    end = position + size
    all_best = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    all_total = tl.zeros((LINES,), dtype=tl.float32)
    all_sums = tl.zeros((LINES, SIZE_BLOCK), dtype=tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = first_key(position, WINDOW, BLOCK)
    for begin in range(lowest // CHUNK * CHUNK, end, CHUNK):
        best = tl.full((LINES,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((LINES, 16), dtype=tl.float32)
        sums = tl.zeros((LINES, SIZE_BLOCK), dtype=tl.float32)
        low = begin
        if WINDOW > 0:
            low = tl.maximum(begin, lowest)
        for start in range(low, tl.minimum(end, begin + CHUNK), BLOCK):
            at = start + steps
            is_in = (at < end)[:, None] & (lanes < SIZE)[None, :]
            keys = tl.load(keys_ptr + at[:, None].to(tl.int64) * key_stride, mask=is_in, other=0.0)
            values = tl.load(values_ptr + at[:, None].to(tl.int64) * value_stride, mask=is_in, other=0.0)
            is_seen = is_in_window(at[None, :], (position + tokens)[:, None], WINDOW)
            best, total, sums = attend_block(queries, keys, values, is_seen, scale, best, total, sums, "ieee", 0.0)
        weight, mean = mean_of_chunk(best, total, sums)
        all_best, all_total, all_sums = join_chunk(weight, mean, all_best, all_total, all_sums)
    to_ptr = out_ptr + (at_token[:, None] * (KEYS * GROUP) + heads[:, None]) * SIZE + lanes[None, :]
    tl.store(to_ptr, (all_sums / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


def launch_packed(
    query_THD: Tensor,
    key_FKD: Tensor,
    value_FKD: Tensor,
    tiles_4B: Tensor,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None,
    chunk: int,
    lines: int,
) -> None:
    """See `operations.attention`."""
    heads, size = query_THD.shape[1:]
    key_heads, count = key_FKD.shape[1], tiles_4B.shape[1]
    size_block = max(16, triton.next_power_of_2(size))
    group = heads // key_heads
    launch_with_stages(
        _attend_packed, (count, key_heads),
        query_THD, key_FKD, value_FKD, out_THD, tiles_4B, count, scale * LOG2_E,
        query_THD.stride(0), key_FKD.stride(0), value_FKD.stride(0),
        KEYS=key_heads, GROUP=group, SIZE=size, SIZE_BLOCK=size_block, LINES=max(lines, triton.next_power_of_2(group)),
        BLOCK=KEY_BLOCK, CHUNK=chunk, WINDOW=window or 0, num_warps=8 if size_block > 64 else 4,
    )  # fmt: skip
