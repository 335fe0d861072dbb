"""Tokens that the rows of a packed pass have in common are computed once.

In a causal model the hidden states of a token depend on the tokens up to it only, so rows that begin with the same tokens can share
them: siblings share their prompt, the turns of an agent its history. The rows of a pass are a prefix tree. In the order of
`prefix_order` each row shares a prefix with its predecessor, and adds the rest of its tokens to the tree.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_EXPANSION = 4
"""Limit of the tokens of all sequences of a pass, as a multiple of `max_tokens`, which limits the computed tokens.

Attention keeps keys and values of whole sequences for the backward pass: in bfloat16, 4 bytes per layer and channel of the key
heads. With SmolLM2-135M that is about 6 % of what a computed token keeps, with Qwen2-1.5B 1.5 % (estimated from the peak memory of
their training steps). So sharing adds up to a quarter to the memory of a pass.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """The sequences of a packed pass, longest first. The computed tokens of the pass are their added tokens, in this order."""

    lengths: tuple[int, ...]
    added: tuple[int, ...]
    """How many tokens at the end of each sequence are computed for it. The tokens before them are shared with other sequences."""
    sources_F: NDArray[np.int64]
    """For each token of all sequences: its index in the computed tokens."""

    @classmethod
    def unshared(cls, lengths: Sequence[int]) -> "PackedSequences":
        return cls(lengths=tuple(lengths), added=tuple(lengths), sources_F=np.arange(sum(lengths), dtype=np.int64))

    @property
    def num_computed(self) -> int:
        return sum(self.added)


def prefix_order(rows: Sequence[NDArray[np.int32]]) -> tuple[list[int], list[int]]:
    """Row numbers, and how many tokens each row in this order has in common with its predecessor.

    No earlier row has more in common with it. A row that is a prefix of other rows comes after them, so it adds no token.
    """
    # Big-endian bytes sort like the ids.
    keys = [ids.astype(">i4").tobytes() for ids in rows]
    order = sorted(range(len(rows)), key=lambda number: (keys[number], number), reverse=True)
    return order, [0, *(_common(rows[before], rows[number]) for before, number in pairwise(order))][: len(rows)]


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def packed_passes(
    lengths: Sequence[int], common: Sequence[int], trained: Sequence[int], *, max_tokens: int, ranks: int = 1
) -> list[range]:
    """Split rows in prefix order into passes of at most `max_tokens` computed tokens; a longer row gets its own pass.

    As few passes as possible, equally many per rank, and among those splits the one whose largest pass is smallest. Trained tokens
    are limited too: rows with the same tokens add trained tokens, and so logits, but no computed tokens.
    """
    whole, shared = np.array(lengths, dtype=np.int64), np.array(common, dtype=np.int64)
    # A row that adds no token needs no sequence of its own, unless it is the first of its pass, where nothing is shared.
    is_contained = shared == whole
    computed = _Cost.of(whole - shared, more_if_first=shared)
    held = _Cost.of(np.where(is_contained, 0, whole), more_if_first=np.where(is_contained, whole, 0))
    predicted = _Cost.of(np.array(trained, dtype=np.int64), more_if_first=np.zeros_like(whole))

    def filled(limit: int) -> list[range]:
        """Each pass as full as possible: no other split has fewer passes."""
        passes: list[range] = []
        start = 0
        while start < len(whole):
            ends = (
                computed.end(start, limit),
                held.end(start, MAX_EXPANSION * max_tokens),
                predicted.end(start, max_tokens),
            )
            passes.append(range(start, max(start + 1, min(ends))))
            start = passes[-1].stop
        return passes

    allowed = -(-len(filled(max_tokens)) // ranks) * ranks
    return filled(bisect_left(range(max_tokens), True, key=lambda limit: len(filled(limit)) <= allowed))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cost:
    """A cost of rows in prefix order. The first row of a pass may cost more: it shares nothing."""

    sums: NDArray[np.int64]
    """Summed cost of the rows before each row."""
    more_if_first: NDArray[np.int64]

    @classmethod
    def of(cls, costs: NDArray[np.int64], *, more_if_first: NDArray[np.int64]) -> "_Cost":
        return cls(sums=np.concatenate([[0], np.cumsum(costs)]), more_if_first=more_if_first)

    def end(self, start: int, limit: int) -> int:
        """The end of the longest range of rows from `start` on that costs at most `limit`."""
        most = self.sums[start] + limit - self.more_if_first[start]
        return int(np.searchsorted(self.sums, most, side="right")) - 1


def prefix_tree(lengths: Sequence[int], common: Sequence[int]) -> tuple[PackedSequences, list[NDArray[np.int64]]]:
    """The sequences of a pass, and for each row the indices of its tokens in the computed tokens.

    The rows are in prefix order, and nothing is shared with rows before the first. Rows that add no token are not sequences.
    """
    added = [length - shared for length, shared in zip(lengths, [0, *common[1:]], strict=True)]
    # Equal lengths are adjacent, and those that share nothing come first: attention kernels compute them together.
    kept = sorted((n for n in range(len(lengths)) if added[n]), key=lambda n: (-lengths[n], -added[n], n))
    starts = np.zeros(len(lengths), dtype=np.int64)
    starts[kept] = np.cumsum([0, *(added[n] for n in kept)])[:-1]
    sources: list[NDArray[np.int64]] = []
    for length, own, start in zip(lengths, added, starts.tolist(), strict=True):
        new = np.arange(start, start + own, dtype=np.int64)
        sources.append(np.concatenate([sources[-1][: length - own], new]) if own < length else new)
    sequences = PackedSequences(
        lengths=tuple(lengths[n] for n in kept),
        added=tuple(added[n] for n in kept),
        sources_F=np.concatenate([sources[n] for n in kept]),
    )
    return sequences, sources
