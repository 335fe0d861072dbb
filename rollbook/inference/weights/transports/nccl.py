"""Weights over NCCL to vLLM's own back end (`--weight-transfer-config '{"backend": "nccl"}'`): trainer rank 0, workers after it.

The communicator is vLLM's, so the trainer's environment needs vLLM, too. Tensors go one by one in the order of the names that
`/update_weights` announces, as its receiver expects where the group was joined with `packed: false`.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.inference.weights.transport import WayPlace, message
from rollbook.inference.weights.transports.packing import heads_of
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo


def open_way(_name: str, place: WayPlace) -> "NcclWay":
    if not torch.cuda.is_available():
        raise RunError("transfer = 'nccl' needs a CUDA GPU in the trainer; use 'directory' or 'gloo'")
    try:
        communicators = load_on_demand("vllm.distributed.device_communicators.pynccl")
        groups = load_on_demand("vllm.distributed.utils")
    except ImportError as error:
        raise RunError(f"transfer = 'nccl' needs vLLM in the trainer's environment, too: {error}") from error
    return NcclWay(host=place.host, communicator=communicators.PyNcclCommunicator, group=groups.StatelessProcessGroup)


class NcclWay:
    """`communicator` and `group`: vLLM's classes, or others of their shape."""

    def __init__(self, *, host: str, communicator: Any, group: Any) -> None:
        self._host = host
        self._communicator = communicator
        self._group = group
        self._port = 0
        self._joined: Any = None
        self._kept: dict[str, dict[str, Tensor]] = {}

    @property
    def backend(self) -> Backend:
        return "nccl"

    @property
    def is_group(self) -> bool:
        return True

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"nccl:{publication.id}"
        # Copies, on the GPU that sends: the trainer learns on while they move.
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._kept[location] = {
            name: tensor.detach().to(device, copy=True).contiguous() for name, tensor in weights.items()
        }
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._kept = {location: kept for location, kept in self._kept.items() if location in locations}

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        self._leave()
        with socket.create_server((self._host, 0)) as probe:
            self._port = probe.getsockname()[1]
        return [
            InitInfo(
                backend="nccl",
                master_address=self._host,
                master_port=self._port,
                rank_offset=1 + sum(world_sizes[:at]),
                world_size=1 + sum(world_sizes),
            )
            for at in range(len(world_sizes))
        ]

    async def assemble(self, world_size: int) -> None:
        def join() -> Any:
            group = self._group.create(host=self._host, port=self._port, rank=0, world_size=world_size)
            return self._communicator(group, device=torch.device("cuda", torch.cuda.current_device()))

        try:
            self._joined = await asyncio.to_thread(join)
        except RuntimeError as error:
            raise TransientError(f"the NCCL group of {world_size} was not formed: {error}") from error

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        heads = heads_of(self._kept[location])
        return message(
            publication,
            "nccl",
            names=[name for name, _, _ in heads],
            dtype_names=[dtype for _, dtype, _ in heads],
            shapes=[list(shape) for _, _, shape in heads],
        )

    async def send(self, location: str) -> None:
        if self._joined is None:
            raise TransientError("the NCCL group was not formed yet")
        await asyncio.to_thread(self._broadcast, list(self._kept[location].values()))

    async def close(self) -> None:
        self._kept.clear()
        self._leave()

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            for tensor in tensors:
                self._joined.broadcast(tensor, src=0, stream=stream)
            if stream is not None:
                stream.synchronize()
        except RuntimeError as error:
            raise TransientError(f"a member of the NCCL group is gone: {error}") from error

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.destroy()
