"""A forward over packed tokens and cache blocks: its input, and its operations in plain torch.

All tokens of a step form one sequence without padding between rows: first one token for each decoding row, then pieces of prompts.
Keys and values are in blocks; `tables_SP` lists the blocks of every row. `PackedTorchOps` is the reference for the Triton kernels
(`kernels.py`), and lets the same steps run without a GPU.
"""

# M tokens, N rows that sample, S rows, P blocks a row, B tokens a block, H key/value heads, G query heads a key/value head,
# Q = H x G, T positions, D head size, X = Q + 2H heads of a fused projection, W work items of decode attention, K tiles of prefill

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.adapters import AdapterRows
from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.torch_ops import (
    HeadShape,
    attend,
    hidden_keys,
    rotation_at,
    turned_heads,
)
from rollbook.numerics.module_parts import ACTIVATIONS, Activation
from rollbook.numerics.recipe import Attention, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Shared by all layers of one forward. Sizes are those of the bucket; padding has position -1."""

    tokens_M: Tensor
    rows_M: Tensor
    positions_M: Tensor
    tables_SP: Tensor
    samples_N: Tensor
    """The tokens whose logits are needed. The first N tokens include all that decode."""
    num_decode_1: Tensor
    """Number of decoding tokens."""
    is_split: bool
    """Whether long rows are split over several programs, as `items_W` says."""
    chunk_1: Tensor
    """Number of positions that an item covers."""
    item_tokens_W: Tensor
    item_starts_W: Tensor
    first_items_N: Tensor
    """The first item of each decoding token; its items follow each other."""
    tile_starts_K: Tensor
    tile_sizes_K: Tensor
    """A tile is `size` consecutive tokens of one row, from token `start`. Prompts are attended to in tiles."""
    adapters: AdapterRows | None = None

    def places(self, block_size: int) -> tuple[Tensor, Tensor]:
        """The block of each token, and the place in it. The block of padding has no owner."""
        at_M = self.positions_M.clamp(min=0).long()
        return self.tables_SP[self.rows_M.long(), at_M // block_size].long(), at_M % block_size


class PackedOps(Protocol):
    query_tile: int
    """Maximum number of tokens in a tile of prefill attention."""

    def norm(self, x_ME: Tensor, norm: Norm) -> Tensor: ...

    def add_and_norm(self, hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
        """Add in place. Returns the normalised sum."""

    def rotate_and_store(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> None:
        """Rotate queries and keys in place, and write keys and values to their blocks."""

    def attend(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> Tensor:
        """Attention of every token over its row, up to its own position."""

    def gate(self, both_MF: Tensor) -> Tensor: ...

    def scaled(self, x_ME: Tensor) -> eight_bits.Scaled: ...


class PackedTorchOps:
    """Reads the keys of every token separately: simple and slow."""

    query_tile = 16

    def __init__(self, heads: HeadShape, activation: Activation) -> None:
        self._heads = heads
        self._activation = ACTIVATIONS[activation]

    def norm(self, x_ME: Tensor, norm: Norm) -> Tensor:
        return norm(x_ME)

    def add_and_norm(self, hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
        return norm(hidden_ME.add_(added_ME))

    def rotate_and_store(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> None:
        heads = self._heads
        rotary, is_real_M = attention.rotary, step.positions_M >= 0
        rotation = None if rotary is None else rotation_at(rotary, step.positions_M.clamp(min=0).long())
        fused_MXD = turned_heads(fused_MX, heads, attention, rotation)
        block_M, at_M = step.places(blocks.shape[3])
        keys_values_M2HD = fused_MXD[:, heads.queries :].reshape(-1, 2, heads.keys, heads.size)[is_real_M]
        places = block_M[is_real_M], slice(None), slice(None), at_M[is_real_M]
        if blocks.dtype not in eight_bits.LARGEST:
            blocks[places] = keys_values_M2HD
            return
        numbers, exponents = eight_bits.parts_of_blocks(blocks)
        stored = eight_bits.encoded(keys_values_M2HD, blocks.dtype)
        numbers[places], exponents[places] = stored[..., : heads.size], stored[..., heads.size :]

    def attend(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> Tensor:
        heads, count, size = self._heads, len(fused_MX), blocks.shape[3]
        queries_MHGD = fused_MX.view(count, heads.fused, heads.size)[:, : heads.queries].view(
            count, heads.keys, heads.group, heads.size
        )
        used = max(1, int(step.positions_M.max()) // size + 1)
        tables_MP = step.tables_SP[step.rows_M.long(), :used].long()
        read = blocks[tables_MP]
        if blocks.dtype in eight_bits.LARGEST:
            stored = torch.cat(eight_bits.parts_of_blocks(read.flatten(0, 1)), dim=-1)
            read = eight_bits.decoded(stored, fused_MX.dtype)
        # (M, P, 2, H, B, D) to (2, M, H, T, D)
        both = read.view(count, used, 2, heads.keys, size, heads.size).permute(2, 0, 3, 1, 4, 5)
        both = both.reshape(2, count, heads.keys, used * size, heads.size)
        positions_M1, seen_T = step.positions_M[:, None], torch.arange(used * size, device=both.device)
        # Zero, not only masked: a block may hold NaN of an earlier owner, and 0 x NaN is NaN.
        both = both.masked_fill((seen_T > positions_M1)[None, :, None, :, None], 0)
        is_hidden_MT = hidden_keys(positions_M1, seen_T, attention.window) & (positions_M1 >= 0)
        mask_MT = torch.zeros(is_hidden_MT.shape, dtype=both.dtype, device=both.device)
        mask_MT.masked_fill_(is_hidden_MT, float("-inf"))
        attended = attend(queries_MHGD, both[0], both[1], mask_MT[:, None, None], attention)
        return attended.reshape(count, heads.queries * heads.size)

    def gate(self, both_MF: Tensor) -> Tensor:
        gates, ups = both_MF.chunk(2, dim=-1)
        gated: Tensor = self._activation(gates).mul_(ups)
        return gated

    def scaled(self, x_ME: Tensor) -> eight_bits.Scaled:
        return eight_bits.scaled_lines(x_ME)
