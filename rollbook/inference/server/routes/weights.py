"""Weight updates and LoRA adapters, in vLLM's format.

An update names its publication. An old epoch is refused; a repeated update has no effect. The adapter routes load adapters besides
the policy, for requests that name them. The adapter that a trainer publishes belongs to the policy and cannot be unloaded there.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import Adapter, TensorSource, weights_digest
from rollbook.inference.engine import BASE_MODEL, Engine
from rollbook.inference.pause import ADOPTED_EPOCH, OutdatedUpdateError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.responses import error_response, json_response
from rollbook.inference.server.service import PolicyService
from rollbook.inference.server.weight_updates import WeightUpdates
from rollbook.inference.weights.lora import read_adapter
from rollbook.inference.weights.safetensors import read_weight_directory
from rollbook.inference.wire.weights import (
    UNPUBLISHED,
    CheckBody,
    FinishBody,
    InitBody,
    LoadAdapterBody,
    NewVersionBody,
    RpcBody,
    UnloadAdapterBody,
    UpdateBody,
    WeightCheck,
    WeightInfo,
)

INVALID_INPUT, NOT_FOUND = "InvalidUserInput", "NotFoundError"


class WeightRoutes:
    def __init__(self, service: PolicyService, updates: WeightUpdates) -> None:
        self._engine = service.engine
        self._dtype = service.config.dtype
        self._updates = updates

    async def world_size(self, _request: web.Request) -> web.Response:
        return json_response({"world_size": 1})

    async def init(self, request: web.Request) -> web.Response:
        self._updates.init(json_decoder(InitBody).decode_body(await request.read()).init_info)
        return json_response({"message": "Weight transfer initialized"})

    async def leave(self, _request: web.Request) -> web.Response:
        return json_response({"message": "Weight transfer shut down"})

    async def start(self, _request: web.Request) -> web.Response:
        # Nothing to prepare: an update is staged next to the live weights and applied between two forwards.
        return json_response({"message": "Weight update started"})

    async def update(self, request: web.Request) -> web.Response:
        info = json_decoder(UpdateBody).decode_body(await request.read()).update_info
        await _uninterrupted(self._updates.apply(info))
        return json_response({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json_decoder(FinishBody).decode_body(raw) if raw else FinishBody()
        self._require_current(body.weight_version)
        return json_response({"message": "Weight update finished"})

    async def rename(self, request: web.Request) -> web.Response:
        version = json_decoder(NewVersionBody).decode_body(await request.read()).new_version
        self._require_current(version)
        return json_response({"success": True, "new_version": version})

    async def info(self, _request: web.Request) -> web.Response:
        engine = self._engine
        info = WeightInfo.of(engine.publication, exactness=engine.exactness, dtype=self._dtype, adapter=engine.adapter)
        return json_response(info)

    async def check(self, request: web.Request) -> web.Response:
        raw = await request.read()
        action = json_decoder(CheckBody).decode_body(raw).action if raw else "checksum"
        if action != "checksum":
            raise BadRequestError(f"action: {action!r} is not supported; use checksum", param="action")
        publication = self._engine.publication
        check = WeightCheck(
            digest=await self._engine.weights_digest(),
            weight_version=UNPUBLISHED if publication is None else str(publication.id),
            published=None if publication is None else publication.digest,
            dtype=self._dtype,
        )
        return json_response(check)

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = json_decoder(RpcBody).decode_body(await request.read())
        if body.method != "reload_weights":
            raise BadRequestError(f"method: {body.method!r} is not supported; use reload_weights", param="method")
        path = body.kwargs.get("weights_path") or (body.args[0] if body.args else None)
        if not isinstance(path, str):
            raise BadRequestError("kwargs: weights_path must name a directory", param="kwargs")
        await _uninterrupted(self._reload(Path(path)))
        return json_response({"results": [None]})

    async def _reload(self, directory: Path) -> None:
        tensors = await asyncio.to_thread(read_weight_directory, directory)
        digest = await asyncio.to_thread(weights_digest, tensors.values())
        await self._engine.load_tensors(_manual_publication(self._engine, digest, what="reload_weights"), tensors)

    def _require_current(self, version: str | None) -> None:
        """A version is a publication with a digest, so it cannot be renamed: only the current name is accepted."""
        current = WeightInfo.of(self._engine.publication).weight_version
        if version is not None and version != current:
            raise OutdatedUpdateError(
                f"weight_version: {version!r} is not the current version ({current}); /update_weights changes it"
            )


class AdapterRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._engine = service.engine
        self._lock = asyncio.Lock()

    async def load(self, request: web.Request) -> web.Response:
        body = json_decoder(LoadAdapterBody).decode_body(await request.read())
        name = body.lora_name
        if not name or not body.lora_path:
            return error_response(400, INVALID_INPUT, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in (*self._service.model_names, BASE_MODEL, self._published_name):
            return error_response(400, INVALID_INPUT, f"The lora adapter '{name}' conflicts with a served base model.")
        async with self._lock:
            if not body.load_inplace and name in self._engine.named_adapters:
                return error_response(
                    400,
                    INVALID_INPUT,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                )
            try:
                settings, tensors = await asyncio.to_thread(read_adapter, Path(body.lora_path))
            except FileNotFoundError:
                return error_response(
                    404, NOT_FOUND, f"Loading lora {name} failed: No adapter found for {body.lora_path}"
                )
            self._require_original_base(name)
            adapter = Adapter(name=name, settings=settings)
            await _uninterrupted(self._load(adapter, tensors))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = json_decoder(UnloadAdapterBody).decode_body(await request.read()).lora_name
        if not name:
            return error_response(400, INVALID_INPUT, "'lora_name' needs to be provided to unload a LoRA adapter.")
        async with self._lock:
            if name == self._published_name:
                raise OutdatedUpdateError(f"unload_lora_adapter {name} refused: the trainer has published this adapter")
            if name not in self._engine.named_adapters:
                return error_response(404, NOT_FOUND, f"The lora adapter '{name}' cannot be found.")
            await _uninterrupted(self._engine.remove_adapter(name))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _load(self, adapter: Adapter, tensors: Mapping[str, TensorSource]) -> None:
        await self._engine.load_adapter(adapter, tensors)
        if self._engine.publication is None:
            # Nobody has published: the weights that the server was started with are the policy.
            is_base = self._engine.adapter is None
            digest = await (self._engine.base_digest() if is_base else self._engine.weights_digest())
            await self._engine.adopt(Publication(id=PublicationId(0), epoch=ADOPTED_EPOCH, step=0, digest=digest))

    def _require_original_base(self, name: str) -> None:
        current = self._engine.publication
        if current is not None and current.epoch > ADOPTED_EPOCH and self._engine.adapter is None:
            raise OutdatedUpdateError(
                f"load_lora_adapter {name} refused: the trainer of epoch {current.epoch} publishes whole weights, so the base "
                "of the adapter is no longer served"
            )

    @property
    def _published_name(self) -> str | None:
        return None if self._engine.adapter is None else self._engine.adapter.name


def _manual_publication(engine: Engine, digest: str, *, what: str) -> Publication:
    """A publication without a trainer. Refused once a trainer has published, because it has no epoch that could fence it."""
    current = engine.publication
    if current is not None and current.epoch > ADOPTED_EPOCH:
        raise OutdatedUpdateError(
            f"{what} refused: the trainer of epoch {current.epoch} has published {current.id}; use /update_weights"
        )
    number = 0 if current is None else current.id + 1
    return Publication(id=PublicationId(number), epoch=ADOPTED_EPOCH, step=0, digest=digest)


async def _uninterrupted(update: Coroutine[Any, Any, None]) -> None:
    """Finish an update although its client disconnects, so that it is either complete or not started."""
    task = asyncio.ensure_future(update)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark the exception as retrieved
    await asyncio.shield(task)
