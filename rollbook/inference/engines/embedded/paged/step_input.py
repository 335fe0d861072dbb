"""The input of a packed step: built on the host in one block of memory, and read on the device through views.

Sizes are rounded up to buckets, because each bucket is captured as one graph.
"""

# M tokens, N rows that sample, W work items of decode attention, K tiles of prefill attention

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.inference.engines.embedded.adapters import BASE, AdapterRows
from rollbook.inference.engines.embedded.model.packed import PackedStep
from rollbook.inference.engines.embedded.paged.block_pool import SCRATCH
from rollbook.inference.engines.embedded.row_table import DecodeLines, RowTable
from rollbook.inference.engines.embedded.sampling import RowSampling

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
FEW_ROWS = 64
"""Steps with prompts are captured for this many rows and for all rows."""
PROGRAMS_WANTED = 528
"""Number of attention programs that fills a GPU of 132 multiprocessors four times."""
FEWEST_POSITIONS, FEWEST_POSITIONS_OF_MANY = 128, 512
"""Rows are not split into shorter chunks than this; the second is for batches that fill the GPU without splitting."""
CHUNK_STEP = 64
"""Chunks are multiples of what a program reads at once."""
ENOUGH_PROGRAMS, EVEN_POSITIONS = 256, 256
"""So many programs reach the bandwidth of the GPU. Such a batch is not split if its longest row exceeds the mean by fewer positions
than the second: the end of that row is read alone, at about 16 ns a position, and joining the parts of all rows takes longer."""
TABLE_CHANGES = 256
"""Number of changes to the block tables that a step brings along."""
LAST_SAMPLED = -1
"""In the place of a token that only the device knows: the one that its row sampled last."""


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; above the largest, a multiple of it."""
    for limit in buckets:
        if size <= limit:
            return limit
    return -(-size // buckets[-1]) * buckets[-1]


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Tokens of a prompt that are prefilled in this step, from position `start` of their row."""

    row: int
    start: int
    tokens: NDArray[np.int32]
    is_last: bool
    """Whether the row samples its next token after this piece."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a captured step."""

    tokens: int
    rows: int
    items: int
    """0: no row is split."""
    tiles: int
    """0: no prompts."""

    @classmethod
    def decode(cls, rows: int, *, key_heads: int, is_split: bool, parts: int = 0) -> "StepShape":
        """`parts`: of all split rows."""
        return cls(rows, rows, _items(rows, key_heads, parts) if is_split else 0, 0)

    @classmethod
    def mixed(
        cls, tokens: int, rows: int, *, key_heads: int, query_tile: int, is_split: bool = True, parts: int = 0
    ) -> "StepShape":
        items = _items(rows, key_heads, parts) if is_split else 0
        return cls(tokens, rows, items, tokens // query_tile + rows)


def _items(rows: int, key_heads: int, parts: int = 0) -> int:
    return item_counts(rows, key_heads, parts)[-1]


def item_counts(rows: int, key_heads: int, parts: int) -> list[int]:
    """The numbers of items that steps are captured for, up to the first that holds `parts`. Items without a part cost little."""
    counts = [max(2 * rows, -(-PROGRAMS_WANTED // key_heads))]
    while counts[-1] < parts:
        counts.append(2 * counts[-1])
    return counts


@cache
def layout_of(shape: StepShape) -> "StepInput":
    return StepInput(shape)


class StepInput:
    """The sections of the input for one shape, as views into one block of 4-byte numbers."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        rows, tokens, items, tiles = shape.rows, shape.tokens, shape.items, shape.tiles
        sizes = {
            "keys": 2 * rows,  # first, because its 8-byte numbers must be aligned
            "temperatures": rows,
            "top_k": rows,
            "top_p": rows,
            "samples": rows,
            "sample_rows": rows,
            "first_items": rows,
            "changed": TABLE_CHANGES,
            "changed_blocks": TABLE_CHANGES,
            "num_decode": 1,
            "chunk": 1,
            "tokens": tokens,
            "rows": tokens,
            "positions": tokens,
            "adapters": tokens,
            "item_tokens": items,
            "item_starts": items,
            "tile_starts": tiles,
            "tile_sizes": tiles,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._sections = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self.length: int = ends[-1]

    def adapters(self, block: Tensor) -> Tensor:
        """The adapter of each token."""
        return block[self._sections["adapters"]]

    def step(
        self, block: Tensor, *, last_tokens_S: Tensor, tables_SP: Tensor, adapters: AdapterRows | None = None
    ) -> PackedStep:
        """The device's view of the input. Applies the changes to the tables. `last_tokens_S`: the token each row sampled last."""
        parts = {name: block[section] for name, section in self._sections.items()}
        tables_SP.view(-1)[parts["changed"]] = parts["changed_blocks"]
        tokens_M = torch.where(parts["tokens"] < 0, last_tokens_S[parts["rows"]], parts["tokens"])
        return PackedStep(
            tokens_M=tokens_M,
            rows_M=parts["rows"],
            positions_M=parts["positions"],
            tables_SP=tables_SP,
            samples_N=parts["samples"],
            num_decode_1=parts["num_decode"],
            is_split=bool(self.shape.items),
            chunk_1=parts["chunk"],
            item_tokens_W=parts["item_tokens"],
            item_starts_W=parts["item_starts"],
            first_items_N=parts["first_items"],
            tile_starts_K=parts["tile_starts"],
            tile_sizes_K=parts["tile_sizes"],
            adapters=adapters,
        )

    def sampling(self, block: Tensor, **flags: bool) -> RowSampling:
        return RowSampling(
            keys_N=block[self._sections["keys"]].view(torch.int64),
            temperatures_N=block[self._sections["temperatures"]].view(torch.float32),
            top_k_N=block[self._sections["top_k"]],
            top_p_N=block[self._sections["top_p"]].view(torch.float32),
            **flags,
        )

    def sample_rows(self, block: Tensor) -> Tensor:
        return block[self._sections["sample_rows"]]

    def fill(
        self,
        block: NDArray[np.int32],
        table: RowTable,
        lines: DecodeLines,
        pieces: Sequence[PromptSlice],
        *,
        changes: tuple[NDArray[np.int64], NDArray[np.int32]],
        chunk: int,
        query_tile: int,
    ) -> None:
        """Write a step into `block`: the tokens of `lines`, then the pieces. `changes`: to the block tables."""
        shape, padding_row = self.shape, table.max_rows
        parts = {name: block[section] for name, section in self._sections.items()}
        changed = len(changes[0])
        parts["changed"][:changed], parts["changed_blocks"][:changed] = changes
        # The last place belongs to the row for padding.
        parts["changed"][changed:], parts["changed_blocks"][changed:] = -1, SCRATCH
        count = len(lines.rows)
        parts["tokens"][:count] = LAST_SAMPLED if lines.tokens is None else lines.tokens
        parts["rows"][:count] = lines.rows
        parts["positions"][:count] = lines.positions
        parts["num_decode"][0], parts["chunk"][0] = count, chunk
        sampled, columns, keys, samples = lines.rows, lines.columns, lines.keys, np.arange(count)
        end = count
        if pieces:
            lengths = np.array([len(piece.tokens) for piece in pieces])
            rows = np.array([piece.row for piece in pieces])
            ends = count + np.cumsum(lengths)
            starts, end = ends - lengths, int(ends[-1])
            parts["tokens"][count:end] = np.concatenate([piece.tokens for piece in pieces])
            parts["rows"][count:end] = np.repeat(rows, lengths)
            from_start = np.arange(count, end) - np.repeat(starts, lengths)
            parts["positions"][count:end] = from_start + np.repeat([piece.start for piece in pieces], lengths)
            is_last = np.array([piece.is_last for piece in pieces])
            sampled = np.concatenate([sampled, rows[is_last]])
            columns = np.concatenate([columns, rows[is_last]])
            keys = np.concatenate([keys, table.keys[rows[is_last]]])
            samples = np.concatenate([samples, ends[is_last] - 1])
            numbers = -(-lengths // query_tile)
            tiles = int(numbers.sum())
            offsets = (np.arange(tiles) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * query_tile
            parts["tile_starts"][:tiles] = np.repeat(starts, numbers) + offsets
            parts["tile_sizes"][:tiles] = np.minimum(query_tile, np.repeat(lengths, numbers) - offsets)
            parts["tile_sizes"][tiles:] = 0
        parts["tokens"][end:] = 0
        parts["rows"][end:] = padding_row
        parts["adapters"][:end] = table.adapters[parts["rows"][:end]]
        parts["adapters"][end:] = BASE
        parts["positions"][end:] = -1
        number = len(sampled)
        parts["keys"].view(np.int64)[:number] = keys
        parts["keys"].view(np.int64)[number:] = 0
        for section, column in (
            (parts["temperatures"], table.temperatures.view(np.int32)),
            (parts["top_k"], table.top_k),
            (parts["top_p"], table.top_p.view(np.int32)),
        ):
            section[:number] = column[sampled]
            section[number:] = 0
        parts["samples"][:number] = samples
        parts["samples"][number:] = 0
        parts["sample_rows"][:number] = columns
        parts["sample_rows"][number:] = padding_row
        if shape.items:
            self._fill_items(parts, lines.positions + 1, chunk)

    def _fill_items(self, parts: dict[str, NDArray[np.int32]], lengths: NDArray[np.int32], chunk: int) -> None:
        numbers = -(-lengths // chunk)
        items = int(numbers.sum())
        firsts = np.cumsum(numbers) - numbers
        parts["first_items"][: len(lengths)] = firsts
        parts["item_tokens"][:items] = np.repeat(np.arange(len(lengths)), numbers)
        parts["item_starts"][:items] = (np.arange(items) - np.repeat(firsts, numbers)) * chunk
        parts["item_tokens"][items:] = -1


def chunk_length(lengths: NDArray[np.int32], *, rows: int, key_heads: int) -> int:
    """How many positions of a row one attention program covers: few enough to share the work, and all parts fit into the items."""
    count = len(lengths)
    if not count:
        return FEWEST_POSITIONS
    longest, total = int(lengths.max()), int(lengths.sum())
    programs = count * key_heads
    if programs >= ENOUGH_PROGRAMS and longest - total / count < EVEN_POSITIONS:
        return longest
    fewest = FEWEST_POSITIONS_OF_MANY if programs >= 2 * PROGRAMS_WANTED else FEWEST_POSITIONS
    # A row has at most one part that is not full, so this many positions a part are enough.
    needed = -(-total // (_items(rows, key_heads) - count))
    return max(fewest, -(-needed // CHUNK_STEP) * CHUNK_STEP)
