"""The verbs that change weights, in vLLM's shapes. An update names its publication: an old epoch is refused, a repeat harmless."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import weights_digest
from rollbook.inference.engine import Engine
from rollbook.inference.pause import ADOPTED_EPOCH, OutdatedUpdateError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.replies import json_response
from rollbook.inference.server.service import PolicyService
from rollbook.inference.server.weight_updates import WeightIntake
from rollbook.inference.weights.safetensors import read_weight_directory
from rollbook.inference.wire.weights import (
    UNPUBLISHED,
    CheckBody,
    FinishBody,
    InitBody,
    NewVersionBody,
    RpcBody,
    UpdateBody,
    WeightCheck,
    WeightInfo,
)


class WeightRoutes:
    def __init__(self, service: PolicyService, intake: WeightIntake) -> None:
        self._engine = service.engine
        self._dtype = service.config.dtype
        self._intake = intake
        self._decode_update = msgspec.json.Decoder(UpdateBody).decode
        self._decode_init = msgspec.json.Decoder(InitBody).decode

    async def world_size(self, _request: web.Request) -> web.Response:
        return json_response({"world_size": 1})

    async def init(self, request: web.Request) -> web.Response:
        await self._intake.join(self._decode_init(await request.read()).init_info)
        return json_response({"message": "Weight transfer initialized"})

    async def leave(self, _request: web.Request) -> web.Response:
        await self._intake.leave()
        return json_response({"message": "Weight transfer shut down"})

    async def start(self, _request: web.Request) -> web.Response:
        # Nothing to prepare: an update is staged beside the weights in use and applied between two forwards.
        return json_response({"message": "Weight update started"})

    async def update(self, request: web.Request) -> web.Response:
        info = self._decode_update(await request.read()).update_info
        await to_its_end(self._intake.take(info))
        return json_response({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = msgspec.json.decode(raw, type=FinishBody) if raw else FinishBody()
        self._require_current(body.weight_version)
        return json_response({"message": "Weight update finished"})

    async def rename(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=NewVersionBody).new_version
        self._require_current(asked)
        return json_response({"success": True, "new_version": asked})

    async def info(self, _request: web.Request) -> web.Response:
        return json_response(WeightInfo.of(self._engine.publication, self._dtype, self._engine.adapter))

    async def check(self, request: web.Request) -> web.Response:
        raw = await request.read()
        action = msgspec.json.decode(raw, type=CheckBody).action if raw else "checksum"
        if action != "checksum":
            raise BadRequestError(f"action: {action!r} is not offered; there is checksum", param="action")
        publication = self._engine.publication
        check = WeightCheck(
            digest=await self._engine.weights_digest(),
            weight_version=UNPUBLISHED if publication is None else str(publication.id),
            published=None if publication is None else publication.digest,
            dtype=self._dtype,
        )
        return json_response(check)

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=RpcBody)
        if body.method != "reload_weights":
            raise BadRequestError(f"method: {body.method!r} is not offered; there is reload_weights", param="method")
        path = body.kwargs.get("weights_path") or (body.args[0] if body.args else None)
        if not isinstance(path, str):
            raise BadRequestError("kwargs: weights_path must name a directory", param="kwargs")
        await to_its_end(self._reload(Path(path)))
        return json_response({"results": [None]})

    async def _reload(self, directory: Path) -> None:
        tensors = await asyncio.to_thread(read_weight_directory, directory)
        digest = await asyncio.to_thread(weights_digest, tensors.values())
        await self._engine.load_tensors(publication_by_hand(self._engine, digest, what="reload_weights"), tensors)

    def _require_current(self, version: str | None) -> None:
        """Versions are publications with a digest. Renaming one would make every stamp a lie, so only its own name is taken."""
        current = WeightInfo.of(self._engine.publication).weight_version
        if version is not None and version != current:
            raise OutdatedUpdateError(
                f"weight_version: {version!r} is not what this server has ({current}); it comes with /update_weights"
            )


def publication_by_hand(engine: Engine, digest: str, *, what: str) -> Publication:
    """Weights without a trainer: allowed only while no trainer has published, since they carry no epoch to be fenced by."""
    current = engine.publication
    if current is not None and current.epoch > ADOPTED_EPOCH:
        raise OutdatedUpdateError(
            f"{what} refused: a trainer of epoch {current.epoch} has published {current.id}; it uses /update_weights"
        )
    number = 0 if current is None else current.id + 1
    return Publication(id=PublicationId(number), epoch=ADOPTED_EPOCH, step=0, digest=digest)


async def to_its_end(update: Coroutine[Any, Any, None]) -> None:
    """A trainer that hangs up in the middle must find the update either done or not begun."""
    task = asyncio.ensure_future(update)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits any more
    await asyncio.shield(task)
