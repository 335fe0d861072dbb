"""The blocks of keys and values on the device, and the table that lists the blocks of every row.

The tensors grow on demand. `generation` changes whenever their memory moves, so that captured graphs are captured again.
"""

# S rows, P blocks a row, B tokens a block, H key/value heads, D head size, L layers with experts, K experts of a token

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.inference.engines.embedded.paged.block_pool import SCRATCH
from rollbook.inference.engines.embedded.routes import RouteShape
from rollbook.inference.engines.embedded.slot_cache import LayerShape, to_device

_NOTHING = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))


class BlockCache:
    """`layers`: one tensor (blocks, 2, H, B, D) for each layer, keys before values. The last row of the table is for padding."""

    def __init__(
        self,
        shape: LayerShape,
        *,
        num_layers: int,
        block_size: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        routes: RouteShape | None = None,
    ) -> None:
        """`routes`: set if the chosen experts are kept, too."""
        self.block_size = block_size
        self._route_shape = routes
        self.routes: Tensor | None = None
        """Chosen experts, (blocks, B, L, K)."""
        self.num_blocks = 0
        self.generation = 0
        self._block_shape = (2, shape.heads, block_size, shape.key_size)
        self._dtype, self._device = dtype, device
        self.layers: list[Tensor] = [torch.empty(0, *self._block_shape, dtype=dtype, device=device)] * num_layers
        width = -(-max_length // block_size)
        self.tables_SP = torch.full((max_rows + 1, width), SCRATCH, dtype=torch.int32, device=device)
        self.host_tables_SP: NDArray[np.int32] = np.full((max_rows + 1, width), SCRATCH, dtype=np.int32)
        self._changed: list[NDArray[np.int64]] = []

    @staticmethod
    def bytes_per_block(
        shape: LayerShape,
        *,
        num_layers: int,
        block_size: int,
        dtype: torch.dtype,
        routes: RouteShape | None = None,
    ) -> int:
        of_routes = 0 if routes is None else routes.num_bytes
        return block_size * (num_layers * shape.elements * dtype.itemsize + of_routes)

    def resize(self, num_blocks: int) -> None:
        """Grow to `num_blocks`. Layer by layer, to limit the extra memory. If the memory is not enough for all layers, some have
        moved, but the blocks so far can be used."""
        self.generation += 1
        for index, old in enumerate(self.layers):
            new = torch.empty(num_blocks, *self._block_shape, dtype=self._dtype, device=self._device)
            new[: len(old)] = old
            self.layers[index] = new
            del old
        self._set_routes(num_blocks)
        self.num_blocks = num_blocks
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def replace(self, num_blocks: int) -> None:
        """Free all blocks, and allocate `num_blocks` without content. Without memory for all layers, there are none."""
        self._free()
        try:
            for index in range(len(self.layers)):
                self.layers[index] = torch.empty(num_blocks, *self._block_shape, dtype=self._dtype, device=self._device)
            self._set_routes(num_blocks)
        except RuntimeError:
            self._free()
            raise
        self.num_blocks = num_blocks

    def _free(self) -> None:
        self.generation += 1
        self.num_blocks = 0
        self.layers = [layer[:0].clone() for layer in self.layers]
        self.routes = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def read_routes(self, blocks: Sequence[int], length: int) -> NDArray[Any] | None:
        """The experts chosen in the first `length` positions of a row with these blocks; None if they are not recorded."""
        if self.routes is None or self._route_shape is None:
            return None
        used = to_device(torch.tensor(blocks[: -(-length // self.block_size)], dtype=torch.long), self._device)
        return self._route_shape.read(self.routes[used].flatten(0, 1)[:length])

    def _set_routes(self, num_blocks: int) -> None:
        """Blocks for routes, with the content of those so far."""
        if (shape := self._route_shape) is not None:
            size = (num_blocks, self.block_size, shape.layers, shape.choices)
            new = torch.empty(size, dtype=shape.dtype, device=self._device)
            if self.routes is not None:
                new[: len(self.routes)] = self.routes
            self.routes = new

    def set_blocks(self, rows: NDArray[np.int64], at: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Block `blocks[i]` becomes number `at[i]` of row `rows[i]`. Reaches the device with `take_changes`."""
        self.host_tables_SP[rows, at] = blocks
        self._changed.append(rows * self.host_tables_SP.shape[1] + at)

    def set_row(self, row: int, blocks: Sequence[int]) -> None:
        """The first blocks of a row."""
        start = row * self.host_tables_SP.shape[1]
        self.host_tables_SP[row, : len(blocks)] = blocks
        self._changed.append(np.arange(start, start + len(blocks)))

    def take_changes(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places in the flat table that changed, and their blocks, to be written by the next step. More than `most` are uploaded
        here instead."""
        if not self._changed:
            return _NOTHING
        changed = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed.clear()
        blocks = self.host_tables_SP.reshape(-1)[changed]
        if len(changed) <= most:
            return changed, blocks
        both = to_device(torch.from_numpy(np.stack([changed, blocks])), self._device)
        self.tables_SP.view(-1).index_copy_(0, both[0], both[1].to(torch.int32))
        return _NOTHING
