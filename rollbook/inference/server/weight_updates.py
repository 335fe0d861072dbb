"""Receives weight updates. The transport that needs a tensor library is imported only when it is used."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollbook.contracts.errors import TransientError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import TensorSource, WeightsError
from rollbook.inference.engine import Engine
from rollbook.inference.pause import needs_loading
from rollbook.inference.request import BadRequestError
from rollbook.inference.weights.node_copies import NodeCopies
from rollbook.inference.wire.weights import InitInfo, RangeManifest, UpdateInfo

GPU_RECEIVER = "rollbook.inference.weights.transports.cuda_ipc:received_tensors"


class WeightUpdates:
    """One instance per server. Applies one update at a time."""

    def __init__(self, engine: Engine, *, token: str | None = None) -> None:
        """`token`: sent when weights are fetched from the trainer and other replicas."""
        self._engine = engine
        self._token = token
        self._copies: NodeCopies | None = None
        self._lock = asyncio.Lock()

    def init(self, info: InitInfo) -> None:
        """No transport needs a set-up. A process group is refused: vLLM's trainers would wait for a member that never joins."""
        if info.master_address is not None:
            raise BadRequestError(
                "backend: this server joins no process group; push with rollbook.SyncWeightTransferClient, "
                "to other machines with transfer = 'pull'",
                param="backend",
            )

    def close(self) -> None:
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
        if info.backend != "cuda_ipc":
            raise BadRequestError(f"backend: {info.backend} is for vLLM; use pull", param="backend")
        info.tensor_headers()
        async with self._lock:
            needs_loading(self._engine.publication, publication)  # refuses an outdated update
            tensors: Mapping[str, TensorSource] = load_on_demand(GPU_RECEIVER)(info)
            await self._engine.load_tensors(publication, tensors, adapter=info.adapter_contract())

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
