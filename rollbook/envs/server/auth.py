"""The token check of the server, and errors as HTTP responses."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.access.guard import Problem, is_loopback
from rollbook.access.tokens import Secret, bearer_token
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.server.playground import STATIC_PATH
from rollbook.envs.server.protocol import HEALTH_PATH, ErrorCode, ReplyKind, WireError, encode
from rollbook.envs.server.reservations import CapacityReachedError, PoolTooSmallError, UnknownReservationError
from rollbook.envs.server.sessions import EnvironmentStartError, SessionEndedError

# A slot becomes free as soon as an environment is closed, so clients of a full server retry soon.
RETRY_AFTER_S = 1
HTTP_STATUS: dict[type[Exception], int] = {
    CapacityReachedError: 503,
    PoolTooSmallError: 409,
    UnknownReservationError: 410,
    WireError: 422,
}
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_exposure(host: str, config: EnvServerConfig) -> None:
    """Raise `RunError` for a server that other machines can reach without a token."""
    if not is_loopback(host) and config.token is None:
        raise RunError(
            f"the environment server on {host} can be reached from other machines; set an access token, or use 127.0.0.1"
        )


def error_message(error: Exception) -> str:
    """An exception as an error message of the protocol."""
    data: dict[str, Any] = {"message": str(error), "code": ErrorCode.EXECUTION_ERROR}
    match error:
        case WireError():
            data["code"] = error.code
        case CapacityReachedError():
            data |= {
                "code": ErrorCode.CAPACITY_REACHED,
                "active_sessions": error.active,
                "max_sessions": error.capacity,
            }
        case PoolTooSmallError() | UnknownReservationError() | SessionEndedError():
            data["code"] = ErrorCode.SESSION_ERROR
        case EnvironmentStartError():
            data["code"] = ErrorCode.FACTORY_ERROR
    return encode(ReplyKind.ERROR, data)


@web.middleware
async def report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Exceptions before a socket is open become HTTP responses with the same body as an error message on the socket."""
    try:
        return await handler(request)
    except (RollbookError, WireError) as error:
        status = HTTP_STATUS.get(type(error), 500)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
        return web.Response(text=error_message(error), status=status, headers=headers, content_type="application/json")


def require_token(config: EnvServerConfig) -> Middleware:
    secret = None if config.token is None else Secret(config.token.get_secret_value())

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if secret is not None and request.path != HEALTH_PATH and not request.path.startswith(STATIC_PATH):
            # A browser cannot set headers for a WebSocket, so the playground sends its token in the query.
            given = bearer_token(request.headers.get("Authorization")) or request.query.get("token", "")
            if not secret.matches(given):
                raise web.HTTPUnauthorized(text="this server requires an access token: send 'Authorization: Bearer …'")
        return await handler(request)

    return check


def refuse(_: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    """The response to a request that the guard refused."""
    body = encode(ReplyKind.ERROR, {"message": message, "code": ErrorCode.VALIDATION_ERROR})
    return web.Response(text=body, status=problem.status, content_type="application/json")
