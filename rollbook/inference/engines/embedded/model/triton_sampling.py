"""Triton kernels that sample a token for each row, and their launch function.

They invert the cumulative distribution, as `sampling.sample` does, so that a row draws the same token on a CPU and on a GPU, except
for rounding. The vocabulary is divided into tiles. The sums of all tiles are those of `triton_logprobs.py`, and so is the
logprob of the token, which the trainer computes in the same way. The kernel here finds the tile that contains the point of a row,
and then the token in it.
"""

# N rows, V vocabulary, T tiles

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import triton
import triton.language as tl
from torch import Tensor

from rollbook.numerics import triton_logprobs
from rollbook.numerics.triton_logprobs import cold_of


@triton.jit
def _choose(
    logits_ptr, temperatures_ptr, keys_ptr, peaks_ptr, totals_ptr, tokens_ptr, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    cold = cold_of(temperature)
    is_greedy = temperature == 0.0
    # 53 random bits, as a number from 0 up to 1.
    uniform = ((tl.load(keys_ptr + row) >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / (1 << 53))
    tiles = tl.arange(0, TILES_BLOCK)
    is_tile = tiles < num_tiles
    peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    totals = tl.load(totals_ptr + row * num_tiles + tiles, mask=is_tile, other=0.0)
    peak = tl.max(peaks, axis=0)
    shares = totals * tl.exp((peaks - peak) * cold)
    # In float64, so that unlikely tokens keep their probabilities.
    ends = tl.cumsum(shares.to(tl.float64), axis=0)
    point = uniform * tl.max(ends, axis=0)
    # The first tile that ends above the point; if rounding leaves none, the last that is not empty.
    last = tl.max(tl.where(shares > 0.0, tiles, 0), axis=0)
    chosen = tl.minimum(tl.sum((ends <= point).to(tl.int32), axis=0), last)
    chosen = tl.where(is_greedy, tl.min(tl.where(peaks == peak, tiles, num_tiles - 1), axis=0), chosen)
    is_chosen = tiles == chosen
    start = tl.max(tl.where(tiles < chosen, ends, 0.0), axis=0)
    tile_peak = tl.max(tl.where(is_chosen, peaks, -float("inf")), axis=0)
    lanes = tl.arange(0, TILE)
    at = chosen * TILE + lanes
    logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
    weights = tl.exp((logits - peak) * cold)
    inner_ends = start + tl.cumsum(weights.to(tl.float64), axis=0)
    inner_last = tl.max(tl.where(weights > 0.0, lanes, 0), axis=0)
    inner = tl.minimum(tl.sum((inner_ends <= point).to(tl.int32), axis=0), inner_last)
    # Of equal logits the lowest token wins.
    inner = tl.where(is_greedy, tl.min(tl.where(logits == tile_peak, lanes, TILE - 1), axis=0), inner)
    # If the logits are not numbers, the token must still be in the vocabulary.
    token = tl.minimum(chosen * TILE + inner, vocab_size - 1)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def launch_sample(
    logits_NV: Tensor, temperatures_N: Tensor, keys_N: Tensor, tokens_N: Tensor, logprobs_N: Tensor
) -> None:
    rows, vocab_size = logits_NV.shape
    peaks_NT, totals_NT, _ = triton_logprobs.launch_reduce(logits_NV, temperatures_N)
    tiles = peaks_NT.shape[1]
    _choose[(rows,)](
        logits_NV, temperatures_N, keys_N, peaks_NT, totals_NT, tokens_N, vocab_size, tiles,
        TILE=triton_logprobs.TILE, TILES_BLOCK=triton.next_power_of_2(tiles), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    triton_logprobs.launch_score(logits_NV, temperatures_N, (peaks_NT, totals_NT), tokens_N, logprobs_N)
