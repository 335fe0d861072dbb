"""Receives weight updates. A transport that needs a tensor library is imported only when it is used."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rollbook.contracts.errors import TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import TensorSource, WeightsError
from rollbook.inference.engine import Engine
from rollbook.inference.pause import needs_loading
from rollbook.inference.request import BadRequestError
from rollbook.inference.weights.node_copies import NodeCopies
from rollbook.inference.wire.weights import InitInfo, RangeManifest, UpdateInfo


class Receiver(Protocol):
    """The receiving end of a transport that does not use files."""

    async def take(self, info: UpdateInfo) -> Mapping[str, TensorSource]:
        """All tensors of the update. Raises `WeightsError` or `TransientError`."""

    async def close(self) -> None: ...


RECEIVERS: dict[str, str] = {
    "gloo": "rollbook.inference.weights.transports.gloo:open_receiver",
    "cuda_ipc": "rollbook.inference.weights.transports.cuda_ipc:open_receiver",
}


class WeightUpdates:
    """One instance per server. Applies one update at a time."""

    def __init__(self, engine: Engine, *, token: str | None = None) -> None:
        """`token`: with which weights are fetched from the trainer and other replicas."""
        self._engine = engine
        self._token = token
        self._copies: NodeCopies | None = None
        self._receiver: Receiver | None = None
        self._backend: str | None = None
        self._lock = asyncio.Lock()

    async def join(self, info: InitInfo) -> None:
        """Join the trainer's process group. Replaces the previous group, even while an update of it waits for a dead member."""
        if info.master_address is not None and info.backend not in RECEIVERS:
            # vLLM's trainers do not name a back end. Without an error they would wait for a member that never joins.
            raise BadRequestError(
                f"backend: {info.backend!r} has no process group, and this server does not receive over NCCL; push with "
                "rollbook.SyncWeightTransferClient, or name the back end 'gloo'",
                param="backend",
            )
        await self.leave()
        if info.backend in RECEIVERS:
            # In a thread: joining a group waits for its other members.
            self._receiver = await asyncio.to_thread(_open_receiver, info)
        self._backend = info.backend

    async def leave(self) -> None:
        receiver, self._receiver, self._backend = self._receiver, None, None
        self._lock = asyncio.Lock()
        if receiver is not None:
            await receiver.close()

    async def close(self) -> None:
        await self.leave()
        if self._copies is not None:
            self._copies.close()

    def find_copy(self, publication: int) -> tuple[RangeManifest, Path] | None:
        """A publication that this machine has fetched, for other replicas."""
        return None if self._copies is None else self._copies.find(publication)

    async def apply(self, info: UpdateInfo) -> None:
        """Raises `OutdatedUpdateError` before any data is transferred."""
        publication = info.to_contract()
        if info.backend in ("directory", "shared_memory"):
            if info.path is None:
                raise BadRequestError("path: required for an update from a file", param="path")
            await self._engine.load_weights(publication, Path(info.path), adapter=info.adapter_contract())
            return
        if info.backend == "pull":
            await self._pull(info, publication)
            return
        info.tensor_headers()
        async with self._lock:
            await self._receive(info, publication)

    async def _pull(self, info: UpdateInfo, publication: Publication) -> None:
        if not info.sources:
            raise BadRequestError("sources: required for an update that the replica fetches", param="sources")
        if self._token is None:
            raise BadRequestError("backend: a server without an access token cannot fetch weights", param="backend")
        if not needs_loading(self._engine.publication, publication):
            return
        if self._copies is None:
            self._copies = NodeCopies(self._token)
        path = await self._copies.fetch(publication, info.sources)
        try:
            await self._engine.load_weights(publication, path, adapter=info.adapter_contract())
        except WeightsError as error:
            if not await asyncio.to_thread(self._copies.remove_if_damaged, publication.id):
                raise
            raise TransientError(
                f"this machine's copy of publication {publication.id} was damaged, or removed by a replica with newer ones: {error}"
            ) from error

    async def _receive(self, info: UpdateInfo, publication: Publication) -> None:
        needs_loading(self._engine.publication, publication)  # refuses an outdated update
        if self._receiver is None or self._backend != info.backend:
            if info.backend != "cuda_ipc":
                raise BadRequestError(
                    f"backend: {info.backend} requires /init_weight_transfer_engine first", param="backend"
                )
            self._receiver, self._backend = _open_receiver(InitInfo(backend="cuda_ipc")), "cuda_ipc"
        receiver = self._receiver
        # The sender of a group needs every member: a replica that has these weights already receives them too.
        tensors = await receiver.take(info)
        if receiver is not self._receiver:
            raise TransientError(f"the group of publication {publication.id} was replaced; nothing was loaded")
        await self._engine.load_tensors(publication, tensors, adapter=info.adapter_contract())


def _open_receiver(info: InitInfo) -> Receiver:
    receiver: Receiver = load_on_demand(RECEIVERS[info.backend])(info)
    return receiver
