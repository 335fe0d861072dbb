"""Weights over NCCL to vLLM's own back end (`--weight-transfer-config '{"backend": "nccl"}'`): the trainer is rank 0.

The communicator is vLLM's, so the trainer's environment needs vLLM too. Tensors are sent one by one in the order of the names in
`/update_weights`, as the receiver expects of a group that was joined with `packed: false`.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.wire.weights import InitInfo, UpdateInfo
from rollbook.shared_weights.packing import header_fields, headers_of

# Loaded by path: vLLM is optional, and its modules may only be imported where a run chose this transport.
COMMUNICATOR = "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator"
PROCESS_GROUP = "vllm.distributed.utils:StatelessProcessGroup"


def open_transport(_name: str, options: TransportOptions) -> "NcclTransport":
    if not torch.cuda.is_available():
        raise RunError(
            "transfer = 'nccl' needs a CUDA GPU in the trainer; remove inference.transfer, or set it to 'auto'"
        )
    try:
        communicator, group = load_on_demand(COMMUNICATOR), load_on_demand(PROCESS_GROUP)
    except ImportError as error:
        raise RunError(f"transfer = 'nccl' needs vLLM in the trainer's environment: {error}") from error
    return NcclTransport(host=options.host, communicator=communicator, group=group)


class NcclTransport:
    """`communicator` and `group`: vLLM's classes, or others with the same methods."""

    takes_gpu_weights = False

    def __init__(self, *, host: str, communicator: Any, group: Any) -> None:
        self._host = host
        self._communicator = communicator
        self._group = group
        self._port = 0
        self._joined: Any = None
        self._stored: dict[str, dict[str, Tensor]] = {}

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"nccl:{publication.id}"
        # Copies on the sending GPU, because training continues during the transfer.
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._stored[location] = {
            name: tensor.detach().to(device, copy=True).contiguous() for name, tensor in weights.items()
        }
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._stored = {location: stored for location, stored in self._stored.items() if location in locations}

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        self._leave()
        self._port = _free_port(self._host)
        return [
            InitInfo(
                backend="nccl",
                master_address=self._host,
                master_port=self._port,
                rank_offset=1 + sum(world_sizes[:index]),
                world_size=1 + sum(world_sizes),
            )
            for index in range(len(world_sizes))
        ]

    async def assemble(self, world_size: int) -> None:
        def join() -> Any:
            group = self._group.create(host=self._host, port=self._port, rank=0, world_size=world_size)
            return self._communicator(group, device=torch.device("cuda", torch.cuda.current_device()))

        joining = asyncio.ensure_future(asyncio.to_thread(join))
        try:
            self._joined = await asyncio.shield(joining)
        except asyncio.CancelledError:
            # The thread continues, and may form the group later.
            joining.add_done_callback(_destroy)
            raise
        except RuntimeError as error:
            raise TransientError(f"the NCCL group of {world_size} was not formed: {error}") from error

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        return update_message(publication, "nccl", **header_fields(headers_of(self._stored[location])))

    async def send(self, location: str) -> None:
        if self._joined is None:
            raise TransientError("the NCCL group was not formed yet")
        await asyncio.to_thread(self._broadcast, list(self._stored[location].values()))

    async def close(self) -> None:
        self._stored.clear()
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


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0)) as probe:
            port: int = probe.getsockname()[1]
    except OSError as error:
        raise RunError(
            f"the trainer cannot form a weight group on inference.transfer_host = {host!r}: {error.strerror or error}"
        ) from error
    return port


def _destroy(joining: "asyncio.Future[Any]") -> None:
    if not joining.cancelled() and joining.exception() is None:
        joining.result().destroy()
