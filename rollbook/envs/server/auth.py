"""Middlewares of the server: token and origin checks, and errors as HTTP responses."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.contracts.errors import RollbookError, RunError
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.pools.reservations import CapacityReachedError, PoolTooSmallError, UnknownReservationError
from rollbook.envs.server.protocol import HEALTH_PATH, ErrorCode, ReplyKind, WireError, encode
from rollbook.envs.server.sessions import EnvironmentStartError, SessionEndedError

# A slot becomes free as soon as an environment is closed, so clients of a full server retry soon.
RETRY_AFTER_S = 1
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HTTP_STATUS: dict[type[Exception], int] = {
    CapacityReachedError: 503,
    PoolTooSmallError: 409,
    UnknownReservationError: 410,
    WireError: 422,
}
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_exposure(host: str, config: EnvServerConfig) -> None:
    """Raise `RunError` for a server that other machines can reach without a token."""
    if host not in LOOPBACK and config.token is None:
        raise RunError(
            f"the environment server on {host} can be reached from other machines; set a token, or use 127.0.0.1"
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
    token = None if config.token is None else config.token.get_secret_value().encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path != HEALTH_PATH:
            # A browser cannot set headers for a WebSocket, so the playground sends its token in the query.
            given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.query.get("token", "")
            if not hmac.compare_digest(given.encode(), token):
                raise web.HTTPUnauthorized(text="this server requires a token: send 'Authorization: Bearer …'")
        return await handler(request)

    return check


@web.middleware
async def check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests from pages of other sites that are open in a browser on this machine."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise web.HTTPForbidden(text=f"pages of {origin} may not connect to {request.host}")
    return await handler(request)
