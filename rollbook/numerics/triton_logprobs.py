"""Triton kernels for log-probabilities of tokens, and their launch functions: the sampler and the trainer use the same.

The vocabulary is divided into tiles. `_reduce_tiles` reduces every tile of every row; `_score` joins the tiles and gives the
log-probability of one token of the row.
"""

# N rows, V vocabulary, T tiles

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Tokens in a tile. Measured on an H200, as the numbers of warps."""


@triton.jit
def cold_of(temperature):
    """1 / temperature, and 1 for a greedy row."""
    return tl.minimum(1.0 / tl.where(temperature == 0.0, 1.0, temperature), 1e37)


@triton.jit
def _reduce_tiles(
    logits_ptr, temperatures_ptr, peaks_ptr, totals_ptr, moments_ptr, vocab_size, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
    highest = tl.max(logits, axis=0)
    # The largest logit is subtracted before scaling: a very small temperature must not overflow.
    peak = tl.where(highest == -float("inf"), 0.0, highest)
    above = (logits - peak) * cold_of(tl.load(temperatures_ptr + row))
    weights = tl.exp(above)
    to = row * tl.num_programs(1) + tile
    tl.store(peaks_ptr + to, highest)
    tl.store(totals_ptr + to, tl.sum(weights, axis=0))
    tl.store(moments_ptr + to, tl.sum(tl.where(weights > 0.0, weights * above, 0.0), axis=0))


def launch_reduce(logits_NV: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every tile: its largest logit, the sum of exponentials relative to it, and the sum of those times their exponents."""
    rows, vocab_size = logits_NV.shape
    tiles = triton.cdiv(vocab_size, TILE)
    # Not parts of one tensor: where a part is not aligned, the kernel would be compiled again.
    peaks_NT, totals_NT, moments_NT = (
        torch.empty((rows, tiles), dtype=torch.float32, device=logits_NV.device) for _ in range(3)
    )
    _reduce_tiles[(rows, tiles)](
        logits_NV, temperatures_N, peaks_NT, totals_NT, moments_NT, vocab_size, TILE=TILE,
        num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return peaks_NT, totals_NT, moments_NT


@triton.jit
def _score(
    logits_ptr, temperatures_ptr, peaks_ptr, totals_ptr, tokens_ptr, logprobs_ptr, vocab_size, num_tiles,
    TILES_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cold = cold_of(tl.load(temperatures_ptr + row))
    tiles = tl.arange(0, TILES_BLOCK)
    is_tile = tiles < num_tiles
    peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    totals = tl.load(totals_ptr + row * num_tiles + tiles, mask=is_tile, other=0.0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.exp((peaks - peak) * cold), axis=0)
    logit = tl.load(logits_ptr + row * vocab_size + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(logprobs_ptr + row, (logit - peak) * cold - tl.log(total))


def launch_score(
    logits_NV: Tensor, temperatures_N: Tensor, tiles: tuple[Tensor, Tensor], tokens_N: Tensor, logprobs_N: Tensor
) -> None:
    """The log-probability of one token of each row. `tiles`: largest logits and sums of `launch_reduce`."""
    (rows, vocab_size), (peaks_NT, totals_NT) = logits_NV.shape, tiles
    count = peaks_NT.shape[1]
    _score[(rows,)](
        logits_NV, temperatures_N, peaks_NT, totals_NT, tokens_N, logprobs_N, vocab_size, count,
        TILES_BLOCK=triton.next_power_of_2(count), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
