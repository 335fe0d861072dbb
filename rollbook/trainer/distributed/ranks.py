"""The ranks that train one model: which rank computes which microbatch, and sums over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rollbook.trainer.data.minibatches import Microbatch

Passes = Sequence[tuple[Microbatch, bool]]
"""The passes of one rank in a minibatch, each with whether it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the ranks. With one rank, all work is its own and no collective is called."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls, size: int) -> "Ranks":
        """This process, in the process group that it has joined."""
        return cls() if size == 1 else cls(rank=dist.get_rank(), size=dist.get_world_size())

    def own_passes(self, microbatches: Sequence[Microbatch]) -> Passes:
        """The passes of this rank.

        Every pass exchanges gradients, so all ranks need equally many: a rank with one less adds a pass with weight 0.
        """
        own = [(micro, True) for micro in microbatches[self.rank :: self.size]]
        rounds = -(-len(microbatches) // self.size)
        if len(own) < rounds:
            idle = replace(microbatches[-1], weights_N=np.zeros_like(microbatches[-1].weights_N))
            own.append((idle, False))
        return own

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, at every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values
