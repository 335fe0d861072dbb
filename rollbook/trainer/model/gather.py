"""Rows of a tensor by index, each as often as needed, with a gradient that is summed in a fixed order."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag


def on_device(array: NDArray[Any], device: str | torch.device) -> Tensor:
    """A copy, for which Python does not wait: from pageable memory, it would wait for everything that the device computes."""
    host = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Selects rows like `index_select`, whose gradient on a GPU is a sum in random order: its last bits change from run to run.

    Here the positions of each row are summed one after the other, in float32 even for bfloat16, without a copy of the gradient.
    """

    index_F: Tensor
    positions_F: Tensor
    """Positions in the result, sorted by the row that they are copies of."""
    starts: Tensor
    """Start of each row's positions in `positions_F`, and their end."""

    @classmethod
    def of(cls, index_F: NDArray[np.int64], num_rows: int, device: str | torch.device) -> "Gather":
        index = on_device(index_F, device)
        rows, positions = torch.sort(index, stable=True)
        starts = torch.searchsorted(rows, torch.arange(num_rows + 1, device=device))
        return cls(index_F=index, positions_F=positions, starts=starts)

    def __call__(self, rows: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(rows, self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return gathered

    def sums(self, copies: Tensor) -> Tensor:
        """For each row, the sum of its copies."""
        summed = embedding_bag(
            self.positions_F, copies.flatten(1).contiguous(), self.starts, mode="sum", include_last_offset=True
        )
        return summed.view(-1, *copies.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return rows.index_select(0, gather.index_F)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gather.sums(gradient), None
