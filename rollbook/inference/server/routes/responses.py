"""JSON responses, and errors in OpenAI's format."""

import logging
import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.weights import WeightsError
from rollbook.inference.engine import (
    EngineQueueFullError,
    GenerationError,
    GrammarError,
    UnknownAdapterError,
    UnpublishedError,
)
from rollbook.inference.pause import OutdatedUpdateError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.service import RETRY_AFTER_S, StaleWeightsError, UnknownModelError
from rollbook.inference.wire.completions import (
    GENERATION_FAILED,
    OUTDATED_UPDATE,
    QUEUE_FULL,
    STALE_WEIGHTS,
    ErrorDetail,
    OpenAiError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FIELD_IN_MESSAGE = re.compile(r"\$\.(?:(?:update|init)_info\.)?(\w+)|field `(\w+)`|^(\w+)\b(?: is|:)")
"""msgspec writes `$.field` or "field `name`"; our messages start with the field."""
LOG = logging.getLogger("rollbook.inference")
encode_json = msgspec.json.Encoder().encode


def json_response(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json")


def error_response(
    status: int, kind: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> web.Response:
    detail = ErrorDetail(message=message, type=kind, code=status, param=param)
    response = json_response(OpenAiError(error=detail), status=status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    return response


def response_to(error: Exception) -> web.Response | None:
    """The response to an error, by its class. None: an unexpected error."""
    message = str(error)
    match error:
        case BadRequestError():
            return error_response(400, "BadRequestError", message, param=error.param)
        case UnknownModelError() | UnknownAdapterError():
            return error_response(404, "NotFoundError", message, param="model")
        case WeightsError():
            return error_response(400, "WeightsError", message)
        case OutdatedUpdateError():
            return error_response(409, OUTDATED_UPDATE, message)
        case UnpublishedError() | StaleWeightsError():
            return error_response(503, STALE_WEIGHTS, message, retry_after_s=RETRY_AFTER_S)
        case GrammarError():
            return error_response(400, "BadRequestError", message, param="structured_outputs")
        case GenerationError():
            return error_response(500, GENERATION_FAILED, message)
        case TransientError():
            kind = QUEUE_FULL if isinstance(error, EngineQueueFullError) else "unavailable"
            return error_response(503, kind, message, retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        case EpisodeError():
            return error_response(400, "BadRequestError", message, param="messages")
        case RecursionError():
            return error_response(400, "BadRequestError", "the body is nested too deeply")
        case msgspec.MsgspecError() | ValueError():
            found = FIELD_IN_MESSAGE.search(message)
            param = next((name for name in found.groups() if name), None) if found else None
            return error_response(400, "BadRequestError", message, param=param)
        case web.HTTPException():
            return error_response(error.status, type(error).__name__, error.text or error.reason)
    return None


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        response = response_to(error)
        if response is None:
            # The client gets the cause: whoever repeats the request must be able to say why it fails.
            LOG.exception("%s %s failed", request.method, request.path)
            return error_response(500, "InternalError", f"{type(error).__name__}: {error}")
        return response
