"""The processes that train together, as far as one step is concerned: who does which pass, and sums over all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rollbook.trainer.data.minibatches import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that share a model. Alone, every method does nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls, size: int) -> "Ranks":
        """This process, in a group that was joined before."""
        return cls() if size == 1 else cls(rank=dist.get_rank(), size=dist.get_world_size())

    def own_passes(self, microbatches: Sequence[Microbatch]) -> list[tuple[Microbatch, bool]]:
        """The passes of this rank, each with whether it counts.

        Every rank makes equally many, because gradients are exchanged in each: who has none left makes one that weighs nothing.
        """
        own = [(micro, True) for micro in microbatches[self.rank :: self.size]]
        rounds = -(-len(microbatches) // self.size)
        if len(own) < rounds:
            idle = replace(microbatches[-1], weights_N=np.zeros_like(microbatches[-1].weights_N))
            own.append((idle, False))
        return own

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, at every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values
