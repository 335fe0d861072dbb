"""Chunks of a pass with gated delta layers: which tokens are computed together, from which state, and in how much memory.

The computed tokens of a pass are a forest: each token follows the one before it in its sequence, and the last shared token is
followed by one token of each sequence that has it. A chunk is a run of tokens that follow one another, so it starts from one state:
nothing, or the state after another chunk. Level 0 starts from nothing, level 1 follows level 0, and so on.
"""

# T computed tokens, L chunks

import numpy as np
from numpy.typing import NDArray

from rollbook.trainer.data.prefixes import PackedSequences

NOTHING = -1
"""In place of a token or a chunk."""
WORKSPACE_BYTES = 4 << 30
"""What the backward pass needs of the chunks of one layer at a time. Layers that need more are computed in parts of their heads."""


def workspace_bytes_per_token(value_heads: int, key_size: int, value_size: int) -> int:
    """Measured: 15 to 16 KB for a head of 128 x 128, 7.5 KB for one of 64 x 64; float32."""
    return 64 * value_heads * (key_size + value_size)


def tokens_before(sequences: PackedSequences) -> NDArray[np.int64]:
    """For each computed token, the one before it in its sequence."""
    lengths, added = (np.array(counts, dtype=np.int64) for counts in (sequences.lengths, sequences.added))
    before_T = np.arange(sequences.num_computed, dtype=np.int64) - 1
    last_shared = np.cumsum(lengths) - added - 1
    starts = np.cumsum(added) - added
    before_T[starts] = np.where(lengths == added, NOTHING, sequences.sources_F[last_shared])
    return before_T


def runs_of(before_T: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first token of each chunk, and how many it has, at most `size`. Only the last token of a chunk is followed by those of
    others."""
    count = len(before_T)
    tokens = np.arange(count)
    is_start = before_T != tokens - 1
    is_start[0] = True
    branches = before_T[is_start]
    after = branches[branches != NOTHING] + 1
    is_start[after[after < count]] = True
    starts = np.flatnonzero(is_start)
    lengths = np.diff(starts, append=count)
    pieces = -(-lengths // size)
    offsets = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
    return np.repeat(starts, pieces) + offsets, np.minimum(size, np.repeat(lengths, pieces) - offsets)


def levels_of(
    before_T: NDArray[np.int64], starts_L: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The chunks of each level, those with the most levels after them first, and for each its parent: the place in the level before
    of the chunk that it follows."""
    previous = before_T[starts_L]
    parents = np.where(previous == NOTHING, NOTHING, np.searchsorted(starts_L, previous, side="right") - 1).tolist()
    followers: list[list[int]] = [[] for _ in parents]
    for chunk, parent in enumerate(parents):
        if parent != NOTHING:
            followers[parent].append(chunk)
    levels = [[chunk for chunk, parent in enumerate(parents) if parent == NOTHING]]
    while after := [chunk for parent in levels[-1] for chunk in followers[parent]]:
        levels.append(after)
    heights = [0] * len(parents)
    for level in reversed(levels[1:]):
        for chunk in level:
            heights[parents[chunk]] = max(heights[parents[chunk]], heights[chunk] + 1)
    places = dict.fromkeys([NOTHING], NOTHING)
    found = []
    for level in levels:
        level.sort(key=lambda chunk: (-heights[chunk], places[parents[chunk]]))
        found.append((np.array(level), np.array([places[parents[chunk]] for chunk in level])))
        places |= {chunk: place for place, chunk in enumerate(level)}
    return found
