"""Checks the write-ahead log of SQLite: commits that SQLite ignores because a frame before them is damaged.

SQLite takes the first frame with a wrong checksum for the end of the log, because a log that ends in the middle of a commit is
normal after a crash. One wrong bit therefore hides all later commits, and the rest reads as a consistent, older database. Frames
of the same log have the same salt: a later frame with this salt that ends a commit proves that the log continued.

https://www.sqlite.org/fileformat2.html#walformat
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADER, FRAME_HEADER = 32, 24
LITTLE, BIG = 0x377F0682, 0x377F0683
"""The magic number says in which byte order checksums are computed."""
Sums = tuple[int, int]


def log_damage(database: Path) -> str | None:
    """Why SQLite ignores commits of the log of this database; None if it ignores none. Nothing may write to it meanwhile.

    A power failure damages a log in the same way, behind the last sync.
    """
    path = database.with_name(f"{database.name}-wal")
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(log) <= HEADER:
        return None
    magic, _, page_bytes, _ = struct.unpack_from(">4I", log)
    is_valid = magic in (LITTLE, BIG) and 512 <= page_bytes <= 65_536 and page_bytes & (page_bytes - 1) == 0
    order = "<u4" if magic == LITTLE else ">u4"
    sums = _checksum(np.frombuffer(log, order, 6), (0, 0)) if is_valid else (0, 0)
    if not is_valid or sums != struct.unpack_from(">2I", log, 24):
        return f"{path.name}: its header is damaged, so none of its {len(log)} bytes are read"
    salts = log[16:24]
    size = FRAME_HEADER + page_bytes
    frames = range(HEADER, len(log) - size + 1, size)
    bad = None
    for at in frames:
        found = _checksum(np.frombuffer(log, order, 2, at), sums)
        sums = _checksum(np.frombuffer(log, order, page_bytes // 4, at + FRAME_HEADER), found)
        if log[at + 8 : at + 16] != salts or sums != struct.unpack_from(">2I", log, at + 16):
            bad = at
            break
    if bad is None:
        return None
    commits = [at for at in frames if at >= bad and log[at + 8 : at + 16] == salts and any(log[at + 4 : at + 8])]
    # A process that is killed while it writes the last frame leaves a part of it, or the rest of an older log behind it.
    is_torn = commits == [bad] and frames[-1] != bad
    if not commits or is_torn:
        return None
    number = (bad - HEADER) // size + 1
    return f"{path.name}: frame {number} is damaged, so SQLite ignores {len(commits)} commits from there on"


def _checksum(words: NDArray[np.uint32], sums: Sums) -> Sums:
    """SQLite's checksum: for each pair of words `s0 += x + s1; s1 += y + s0`, modulo 2**32.

    It is linear in the words and in the sums before, so that numpy computes it as one product.
    """
    num_pairs = len(words) // 2
    weights, start = _weights(num_pairs)
    pairs = words.astype(np.uint64).reshape(-1, 2)
    found = np.einsum("nij,nj->i", weights, pairs) + start @ np.array(sums, dtype=np.uint64)
    return int(found[0]) & 0xFFFFFFFF, int(found[1]) & 0xFFFFFFFF


_WEIGHTS: dict[int, tuple[NDArray[np.uint64], NDArray[np.uint64]]] = {}


def _weights(num_pairs: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """How each pair of words and the sums before them enter the sums after them, modulo 2**32."""
    if num_pairs not in _WEIGHTS:
        step, of_pair = np.array([[1, 1], [1, 2]], dtype=np.uint64), np.array([[1, 0], [1, 1]], dtype=np.uint64)
        mask, power = np.uint64(0xFFFFFFFF), np.eye(2, dtype=np.uint64)
        weights = np.empty((num_pairs, 2, 2), dtype=np.uint64)
        for pair in reversed(range(num_pairs)):
            weights[pair] = (power @ of_pair) & mask
            power = (power @ step) & mask
        _WEIGHTS[num_pairs] = weights, power
    return _WEIGHTS[num_pairs]
