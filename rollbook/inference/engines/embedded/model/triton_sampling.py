"""Triton kernels that sample a token for each row, and their launch function.

The vocabulary is divided into tiles. The first kernel reduces every tile of every row: its largest logit, its sum of exponentials,
and the winner of an exponential race. The second joins the tiles of a row. In such a race each token waits for an exponentially
distributed time, divided by its probability, and the first token wins. The noise of a token depends on its row's key and its id
only.
"""

# N rows, V vocabulary, T tiles

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: PLR0917  # kernels take many positional arguments

import torch
import triton
import triton.language as tl
from torch import Tensor

QUARTER = 1024
"""One call of the random generator gives four numbers, so a tile has four quarters of this many tokens."""
ROUNDS = 7
"""Of the generator (Philox): seven are the fewest that pass BigCrush (Salmon et al., 2011). Triton's default is ten."""


@triton.jit
def _cold(temperature):
    """1 / temperature, and 1 for a greedy row."""
    return tl.minimum(1.0 / tl.where(temperature == 0.0, 1.0, temperature), 1e37)


@triton.jit
def _race(logits, peak, cold, uniform, is_greedy):
    """Sum of exponentials, and a score that the winner has the largest of. Exact for small times, because those win."""
    scaled = (logits - peak) * cold
    weights = tl.exp(scaled)
    # The offset keeps the time above zero.
    uniform += 2.3e-10
    waiting = tl.where(uniform < 1e-3, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
    return weights, tl.where(is_greedy, scaled, weights / waiting)


@triton.jit
def _sample_tiles(
    logits_ptr, temperatures_ptr, keys_ptr, peaks_ptr, totals_ptr, scores_ptr, chosen_ptr, tokens_ptr, vocab_size,
    QUARTER: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lanes = tl.arange(0, QUARTER)
    temperature = tl.load(temperatures_ptr + row)
    u0, u1, u2, u3 = tl.rand4x(tl.load(keys_ptr + row), tile * QUARTER + lanes, ROUNDS)
    a0 = tile * (4 * QUARTER) + lanes
    a1, a2, a3 = a0 + QUARTER, a0 + 2 * QUARTER, a0 + 3 * QUARTER
    row_ptr = logits_ptr + row * vocab_size
    none = -float("inf")
    l0 = tl.load(row_ptr + a0, mask=a0 < vocab_size, other=none).to(tl.float32)
    l1 = tl.load(row_ptr + a1, mask=a1 < vocab_size, other=none).to(tl.float32)
    l2 = tl.load(row_ptr + a2, mask=a2 < vocab_size, other=none).to(tl.float32)
    l3 = tl.load(row_ptr + a3, mask=a3 < vocab_size, other=none).to(tl.float32)
    highest = tl.max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), axis=0)
    # The largest logit is subtracted before scaling: a very small temperature must not overflow.
    peak = tl.where(highest == none, 0.0, highest)
    cold = _cold(temperature)
    is_greedy = temperature == 0.0
    w0, s0 = _race(l0, peak, cold, u0, is_greedy)
    w1, s1 = _race(l1, peak, cold, u1, is_greedy)
    w2, s2 = _race(l2, peak, cold, u2, is_greedy)
    w3, s3 = _race(l3, peak, cold, u3, is_greedy)
    score = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0)
    # Of equal scores the lowest token wins. If the logits are not numbers no score is equal.
    at = tl.where(s3 == score, a3, vocab_size - 1)
    at = tl.where(s2 == score, a2, at)
    at = tl.where(s1 == score, a1, at)
    at = tl.where(s0 == score, a0, at)
    token = tl.minimum(tl.min(at, axis=0), vocab_size - 1)
    to = row * tl.num_programs(1) + tile
    tl.store(peaks_ptr + to, highest)
    tl.store(totals_ptr + to, tl.sum(w0 + w1 + w2 + w3, axis=0))
    tl.store(scores_ptr + to, score)
    tl.store(chosen_ptr + to, tl.load(row_ptr + token).to(tl.float32))
    tl.store(tokens_ptr + to, token)


@triton.jit
def _join_tiles(
    peaks_ptr, totals_ptr, scores_ptr, chosen_ptr, tile_tokens_ptr, temperatures_ptr, tokens_ptr, logprobs_ptr, num_tiles,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    cold = _cold(temperature)
    tiles = tl.arange(0, BLOCK)
    is_in = tiles < num_tiles
    at = row * num_tiles + tiles
    peaks = tl.load(peaks_ptr + at, mask=is_in, other=-float("inf"))
    peak = tl.max(peaks, axis=0)
    shares = tl.exp((peaks - peak) * cold)
    totals = tl.load(totals_ptr + at, mask=is_in, other=0.0)
    scores = tl.load(scores_ptr + at, mask=is_in, other=0.0)
    scores = tl.where(temperature == 0.0, peaks, tl.where(is_in, scores * shares, -float("inf")))
    # Scores that are not numbers must not lead outside of the row.
    scores = tl.where(scores == scores, scores, -float("inf"))  # noqa: PLR0124  # only NaN differs from itself
    winner = row * num_tiles + tl.argmax(scores, axis=0)
    chosen = (tl.load(chosen_ptr + winner) - peak) * cold
    tl.store(tokens_ptr + row, tl.load(tile_tokens_ptr + winner).to(tl.int64))
    tl.store(logprobs_ptr + row, chosen - tl.log(tl.sum(tl.where(is_in, totals * shares, 0.0), axis=0)))


def launch_sample(
    logits_NV: Tensor, temperatures_N: Tensor, keys_N: Tensor, tokens_N: Tensor, logprobs_N: Tensor
) -> None:
    rows, vocab_size = logits_NV.shape
    tiles = triton.cdiv(vocab_size, 4 * QUARTER)
    floats_4NT = torch.empty((4, rows, tiles), dtype=torch.float32, device=logits_NV.device)
    tile_tokens_NT = torch.empty((rows, tiles), dtype=torch.int32, device=logits_NV.device)
    _sample_tiles[(rows, tiles)](
        logits_NV, temperatures_N, keys_N, *floats_4NT, tile_tokens_NT, vocab_size,
        QUARTER=QUARTER, ROUNDS=ROUNDS, num_warps=4,
    )  # fmt: skip
    _join_tiles[(rows,)](
        *floats_4NT, tile_tokens_NT, temperatures_N, tokens_N, logprobs_N, tiles,
        BLOCK=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip
