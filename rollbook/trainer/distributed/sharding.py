"""One model trained by several ranks: each computes its own microbatches and holds a shard of every weight, gradient and optimizer
state (FSDP2). Layers are gathered only while they compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollbook.trainer.data.passes import Microbatch

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
            idle = replace(microbatches[-1], weights_N=np.zeros_like(microbatches[-1].weights_N), observed_weight=0.0)
            own.append((idle, False))
        return own

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, at every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def shard(network: nn.Module, *, device: str, is_mixed: bool) -> None:
    """Shard the network over all ranks of the process group, layer by layer. Every rank must hold the same weights."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # Weights stay float32. With bfloat16 passes each layer is cast when it is gathered, and gradients are summed in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
    options: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for layer in layers_of(network):
        fully_shard(layer, **options)
    fully_shard(network, **options)


def gathered(value: Tensor) -> Tensor:
    """A tensor that may be sharded, as a plain one. A collective: all ranks must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Any, parameter: Tensor) -> Any:
    """A value of the optimizer's state, sharded like its parameter. Values of another shape, such as counters, stay plain."""
    has_same_shape = isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
    if not has_same_shape or isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def shard_state(state: Mapping[int, Mapping[str, Any]], parameters: list[Tensor]) -> dict[int, dict[str, Any]]:
    """An optimizer's state by parameter number, as this rank holds it."""
    return {
        number: {name: shard_like(value, parameters[number]) for name, value in held.items()}
        for number, held in state.items()
    }


def cpu_mesh() -> DeviceMesh:
    """All ranks, for tensors in main memory. A collective: all ranks must call it."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own_shards(values: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Copies in main memory of the part that this rank holds of each tensor. They keep their position in the whole tensor."""
    return {name: _own_shard(value.detach(), mesh) for name, value in values.items()}


def _own_shard(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    if not isinstance(value, DTensor):
        return value.to("cpu", copy=True)
    assert mesh is not None
    local = value.to_local().to("cpu", copy=True)
    return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())


def own_rows(parameter: DTensor) -> slice:
    """The rows of a sharded parameter that this rank holds."""
    num_rows, mesh = parameter.shape[0], parameter.device_mesh
    per_rank = -(-num_rows // mesh.size())
    first = min(mesh.get_local_rank() * per_rank, num_rows)
    return slice(first, min(first + per_rank, num_rows))


def from_own_rows(rows: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that is sharded like the parameter, of which this rank holds `rows`."""
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def layers_of(network: nn.Module) -> nn.ModuleList:
    """The layers of the model: its longest module list."""
    lists = [part for part in network.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())
