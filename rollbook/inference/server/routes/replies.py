"""How every route answers: JSON, errors in OpenAI's shape, streams of server-sent events."""

import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.inference.engine import GenerationError, QueueFullError, UnpublishedError, WeightsError
from rollbook.inference.pause import OutdatedUpdateError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.service import RETRY_STALE_S, StaleWeightsError, UnknownModelError
from rollbook.inference.wire.completions import (
    GENERATION_FAILED,
    OUTDATED_UPDATE,
    QUEUE_FULL,
    STALE_WEIGHTS,
    ErrorDetail,
    ErrorReply,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_encode = msgspec.json.Encoder().encode


def json_response(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def error_response(
    status: int, kind: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> web.Response:
    response = json_response(error_reply(status, kind, message, param=param), status=status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    return response


def error_reply(status: int, kind: str, message: str, *, param: str | None = None) -> ErrorReply:
    return ErrorReply(error=ErrorDetail(message=message, type=kind, code=status, param=param))


def bad_request(error: Exception) -> web.Response:
    """Names the field: msgspec says `$.field`, our own messages begin with it."""
    message = str(error)
    found = re.search(r"\$\.(?:(?:update|init)_info\.)?(\w+)|field `(\w+)`|^(\w+)\b(?: is|:)", message)
    param = next((name for name in found.groups() if name), None) if found else None
    return error_response(400, "BadRequestError", message, param=param)


def told(error: Exception) -> web.Response | None:
    """The answer to an error of ours; its class decides the status. None: not ours."""
    match error:
        case BadRequestError():
            return error_response(400, "BadRequestError", str(error), param=error.param)
        case UnknownModelError():
            return error_response(404, "NotFoundError", str(error), param="model")
        case WeightsError():
            return error_response(400, "WeightsError", str(error))
        case OutdatedUpdateError():
            return error_response(409, OUTDATED_UPDATE, str(error))
        case UnpublishedError() | StaleWeightsError():
            return error_response(503, STALE_WEIGHTS, str(error), retry_after_s=RETRY_STALE_S)
        case QueueFullError():
            return error_response(503, QUEUE_FULL, str(error), retry_after_s=error.retry_after_s or RETRY_STALE_S)
        case GenerationError():
            return error_response(500, GENERATION_FAILED, str(error))
        case TransientError():
            return error_response(503, "unavailable", str(error), retry_after_s=error.retry_after_s or RETRY_STALE_S)
        case EpisodeError():
            return error_response(400, "BadRequestError", str(error), param="messages")
        case msgspec.MsgspecError() | ValueError():
            return bad_request(error)
        case web.HTTPException():
            return error_response(error.status, type(error).__name__, error.text or error.reason)
    return None


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in one shape."""
    try:
        return await handler(request)
    except Exception as error:
        answer = told(error)
        if answer is None:
            raise
        return answer


class EventStream:
    """Server-sent events, opened by the first one, so that an early error can still be a status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    async def send(self, value: object) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(b"data: " + _encode(value) + b"\n\n")

    async def fail(self, error: Exception) -> None:
        """An error in the middle: said in the stream, since the status is out."""
        answer = told(error)
        if answer is None:
            raise error
        assert isinstance(answer.body, bytes)
        await self.send(msgspec.Raw(answer.body))

    async def end(self) -> web.StreamResponse:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response
