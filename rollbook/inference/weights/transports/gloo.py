"""Weights over a gloo process group: the trainer is rank 0, then the replicas. For replicas on other hosts without a shared disk.

The group is separate from the process group of the trainer's ranks. When a member is lost, the next send fails, and a new group is
formed with the remaining members.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store, TCPStore

from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter, TensorSource
from rollbook.inference.request import BadRequestError
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.weights.transports.packing import (
    TensorHeader,
    header_fields,
    headers_of,
    layout,
    pack,
    unpack_bytes,
)
from rollbook.inference.wire.weights import InitInfo, UpdateInfo

CHUNK_BYTES = 64 * 2**20
"""Size of one broadcast: large enough to fill any network, small enough to notice a lost member soon."""


def open_transport(_name: str, options: TransportOptions) -> "GlooTransport":
    return GlooTransport(host=options.host, timeout_s=options.timeout_s)


def open_receiver(info: InitInfo) -> "GlooReceiver":
    if info.master_address is None or info.master_port is None:
        raise BadRequestError("master_address: a gloo group needs the trainer's address and port", param="init_info")
    store = TCPStore(info.master_address, info.master_port, is_master=False, timeout=timedelta(seconds=info.timeout_s))
    return GlooReceiver(_join(store, info.rank_offset, info.world_size, info.timeout_s))


def _join(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroupGloo:
    try:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransientError(f"the gloo group of {size} was not formed within {timeout_s:g} s: {error}") from error


def _broadcast(group: Any, packed: Tensor) -> None:  # torch's stubs do not include the group's methods
    """Send from rank 0, chunk by chunk. Raises `TransientError` if a member is gone."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        for start in range(0, packed.numel(), CHUNK_BYTES):
            group.broadcast([packed[start : start + CHUNK_BYTES]], options).wait()
    except RuntimeError as error:
        raise TransientError(f"a member of the weight group is gone: {error}") from error


class GlooTransport:
    """The trainer's end. Keeps the newest publications in memory, so that a replica that missed one can receive it."""

    takes_gpu_weights = False

    def __init__(self, *, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._stored: dict[str, tuple[list[TensorHeader], Tensor]] = {}
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"gloo:{publication.id}"
        self._stored[location] = (headers_of(weights), await asyncio.to_thread(pack, weights))
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._stored = {location: stored for location, stored in self._stored.items() if location in locations}

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        """Every group gets a new store, so that members of an older group cannot join it by mistake."""
        self._leave()
        self._store = TCPStore(
            self._host,
            free_port(self._host),
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
        )
        return [
            InitInfo(
                backend="gloo",
                master_address=self._host,
                master_port=self._store.port,
                rank_offset=1 + sum(world_sizes[:index]),
                world_size=1 + sum(world_sizes),
                timeout_s=self._timeout_s,
            )
            for index in range(len(world_sizes))
        ]

    async def assemble(self, world_size: int) -> None:
        assert self._store is not None
        self._group = await asyncio.to_thread(_join, self._store, 0, world_size, self._timeout_s)

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        return update_message(publication, "gloo", **header_fields(self._stored[location][0]))

    async def send(self, location: str) -> None:
        if self._group is None:
            raise TransientError("the weight group was not formed yet")
        await asyncio.to_thread(_broadcast, self._group, self._stored[location][1])

    async def close(self) -> None:
        self._stored.clear()
        self._leave()

    def _leave(self) -> None:
        self._group = self._store = None


class GlooReceiver:
    """A replica's end."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group: ProcessGroupGloo | None = group

    async def take(self, info: UpdateInfo) -> Mapping[str, TensorSource]:
        if self._group is None:
            raise TransientError("this replica has left the weight group")
        headers = info.tensor_headers()
        _, size = layout(headers)
        packed = torch.empty(size, dtype=torch.uint8)
        await asyncio.to_thread(_broadcast, self._group, packed)
        return unpack_bytes(packed, headers)

    async def close(self) -> None:
        self._group = None


def free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0)) as probe:
            port: int = probe.getsockname()[1]
    except OSError as error:
        raise RunError(
            f"the trainer cannot form a weight group on inference.transfer_host = {host!r}: {error.strerror or error}"
        ) from error
    return port
