"""POST /pause, /resume, /abort_requests; GET /is_paused: holding the engine still, in vLLM's words."""

import msgspec
from aiohttp import web

from rollbook.inference.pause import PauseMode
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.replies import json_response
from rollbook.inference.server.service import PolicyService
from rollbook.inference.wire.weights import AbortBody


class PausingRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode_abort = msgspec.json.Decoder(AbortBody).decode

    async def pause(self, request: web.Request) -> web.Response:
        asked = request.query.get("mode", PauseMode.ABORT.value)
        try:
            mode = PauseMode(asked)
        except ValueError as error:
            raise BadRequestError(f"mode: {asked!r} is none of keep, wait, abort", param="mode") from error
        await self._service.engine.pause(mode)
        return json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        await self._service.engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _request: web.Request) -> web.Response:
        return json_response({"is_paused": self._service.engine.is_paused})

    async def abort(self, request: web.Request) -> web.Response:
        body = self._decode_abort(await request.read())
        return json_response({"status": "aborted", "aborted": self._service.abort(body.request_ids)})
