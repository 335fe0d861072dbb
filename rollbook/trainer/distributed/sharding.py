"""A model spread over ranks (FSDP2): each keeps a part of every weight, gradient and optimizer state, and layers are put together
only while they compute."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(network: nn.Module, *, device: str, is_mixed: bool) -> None:
    """Spread the network over all ranks of the process group, layer by layer. Every rank must hold the same weights."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # Weights stay float32; with bfloat16 passes each layer is cast as it is put together, and gradients are added in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
    options: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for layer in _layers(network):
        fully_shard(layer, **options)
    fully_shard(network, **options)


def whole(value: Tensor) -> Tensor:
    """A tensor that may be spread over ranks, as a plain one. All ranks must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread_like(value: Any, parameter: Tensor) -> Any:
    """A part of the optimizer's state, spread as its parameter is. Counters and the like stay plain."""
    is_alike = isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
    if not is_alike or isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def spread_state(state: Mapping[int, Mapping[str, Any]], parameters: list[Tensor]) -> dict[int, dict[str, Any]]:
    """An optimizer's state by the number of the parameter, as this rank holds it."""
    return {
        number: {name: spread_like(value, parameters[number]) for name, value in held.items()}
        for number, held in state.items()
    }


def _layers(network: nn.Module) -> list[nn.Module]:
    """The blocks of the model: the longest list of modules there is."""
    lists = [list(part) for part in network.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])
