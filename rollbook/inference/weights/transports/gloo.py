"""Weights over a gloo group: trainer rank 0, replicas after it. For replicas on other hosts that share no disk, and no GPU network.

The group is of its own, beside whatever the trainer's ranks use among themselves. It lives as long as its members do: when one is
gone the next send fails, and the group is formed again with those that are left.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store, TCPStore

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication
from rollbook.inference.engine import TensorSource
from rollbook.inference.request import BadRequestError
from rollbook.inference.weights.transport import WayPlace, message
from rollbook.inference.weights.transports.packing import Head, heads_of, layout, pack, unpack_bytes
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo

CHUNK_BYTES = 64 * 2**20
"""One broadcast. Large enough to fill any network, small enough that a lost member is noticed within one."""


def open_way(_name: str, place: WayPlace) -> "GlooWay":
    return GlooWay(host=place.host, timeout_s=place.timeout_s)


def open_receiver(info: InitInfo) -> "GlooReceiver":
    if info.master_address is None or info.master_port is None:
        raise BadRequestError("master_address: a gloo group needs the trainer's address and port", param="init_info")
    store = TCPStore(info.master_address, info.master_port, is_master=False, timeout=timedelta(seconds=info.timeout_s))
    return GlooReceiver(_group(store, info.rank_offset, info.world_size, info.timeout_s))


def _group(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroupGloo:
    try:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransientError(f"the gloo group of {size} was not formed within {timeout_s:g} s: {error}") from error


def _broadcast(group: Any, packed: Tensor) -> None:  # torch's stubs of the group leave its verbs out
    """Chunk by chunk, from rank 0. Raises `TransientError` when a member is gone."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        for start in range(0, packed.numel(), CHUNK_BYTES):
            group.broadcast([packed[start : start + CHUNK_BYTES]], options).wait()
    except RuntimeError as error:
        raise TransientError(f"a member of the weight group is gone: {error}") from error


class GlooWay:
    """The sender. Keeps the newest publications in memory, so that a replica that missed one can get it."""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._kept: dict[str, tuple[list[Head], Tensor]] = {}
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None
        self._number = 0

    @property
    def backend(self) -> Backend:
        return "gloo"

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"gloo:{publication.id}"
        self._kept[location] = (heads_of(weights), await asyncio.to_thread(pack, weights))
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._kept = {location: kept for location, kept in self._kept.items() if location in locations}

    @property
    def is_group(self) -> bool:
        return True

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        """A fresh store for every group: members of an older one cannot meet in it by mistake."""
        self._leave()
        self._number += 1
        self._store = TCPStore(
            self._host,
            _free_port(self._host),
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
        )
        return [
            InitInfo(
                backend="gloo",
                master_address=self._host,
                master_port=self._store.port,
                rank_offset=1 + sum(world_sizes[:at]),
                world_size=1 + sum(world_sizes),
                timeout_s=self._timeout_s,
            )
            for at in range(len(world_sizes))
        ]

    async def assemble(self, world_size: int) -> None:
        assert self._store is not None
        self._group = await asyncio.to_thread(_group, self._store, 0, world_size, self._timeout_s)

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        heads, _ = self._kept[location]
        return message(
            publication,
            "gloo",
            names=[name for name, _, _ in heads],
            dtype_names=[dtype for _, dtype, _ in heads],
            shapes=[list(shape) for _, _, shape in heads],
        )

    async def send(self, location: str) -> None:
        if self._group is None:
            raise TransientError("the weight group was not formed yet")
        await asyncio.to_thread(_broadcast, self._group, self._kept[location][1])

    async def close(self) -> None:
        self._kept.clear()
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
        heads = info.tensor_heads()
        _, size = layout(heads)
        packed = torch.empty(size, dtype=torch.uint8)
        await asyncio.to_thread(_broadcast, self._group, packed)
        return unpack_bytes(packed, heads)

    async def close(self) -> None:
        self._group = None


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
