"""What stands before every route of the server: who may come in, and how a refusal is told over HTTP."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.contracts.errors import RollbookError, RunError
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.pools.reservations import CapacityReachedError, PoolTooSmallError, UnknownTicketError
from rollbook.envs.server.protocol import HEALTH_PATH, ErrorCode, ReplyKind, WireError, encode
from rollbook.envs.server.sessions import EnvironmentStartError, SessionEndedError

# Every client of a full server asks again after this; a place is free as soon as an environment is tidied up.
RETRY_AFTER_S = 1
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HTTP_STATUS: dict[type[Exception], int] = {
    CapacityReachedError: 503,
    PoolTooSmallError: 409,
    UnknownTicketError: 410,
    WireError: 422,
}
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_exposure(host: str, config: EnvServerConfig) -> None:
    """A server that other machines reach lends environments (and, in a terminal environment, a keyboard) to whoever asks: it
    needs a token.
    """
    if host not in LOOPBACK and config.token is None:
        raise RunError(
            f"the environment server on {host} can be reached from other machines; set a token, or use 127.0.0.1"
        )


def error_message(error: Exception) -> str:
    """An error as clients of the wire know it."""
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
        case PoolTooSmallError() | UnknownTicketError() | SessionEndedError():
            data["code"] = ErrorCode.SESSION_ERROR
        case EnvironmentStartError():
            data["code"] = ErrorCode.FACTORY_ERROR
    return encode(ReplyKind.ERROR, data)


@web.middleware
async def tell_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What is raised before a socket is open becomes an HTTP answer with the same body as an error on the socket."""
    try:
        return await handler(request)
    except (RollbookError, WireError) as error:
        status = HTTP_STATUS.get(type(error), 500)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
        return web.Response(text=error_message(error), status=status, headers=headers, content_type="application/json")


def token_needed(config: EnvServerConfig) -> Middleware:
    token = None if config.token is None else config.token.get_secret_value().encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path != HEALTH_PATH:
            # A browser cannot send a header with a WebSocket, so the playground shows its token in the address.
            shown = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.query.get("token", "")
            if not hmac.compare_digest(shown.encode(), token):
                raise web.HTTPUnauthorized(text="this server asks for a token: send 'Authorization: Bearer …'")
        return await handler(request)

    return check


@web.middleware
async def refuse_strangers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page of another site, open in a browser on this machine, could otherwise play here."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise web.HTTPForbidden(text=f"pages of {origin} may not connect to {request.host}")
    return await handler(request)
