"""Serves an HTTP application behind the guard. No other module starts an HTTP server (tests/architecture)."""

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from rollbook.access.guard import REFUSE, AllowedClients, Problem, guard, is_loopback
from rollbook.concurrency.sockets import BACKLOG, url_of

_NAME = re.compile(r"\{(\w+)\}")
DRAIN_S = 2.0
"""How long running requests may take when a server stops."""


@asynccontextmanager
async def serve_app(
    app: web.Application,
    sock: socket.socket,
    *,
    allowed: AllowedClients | None = None,
    drain_s: float = DRAIN_S,
    read_buffer_bytes: int = 2**16,
    is_cancelled_on_disconnect: bool = True,
) -> AsyncIterator[str]:
    """Serve requests on a listening socket while the block runs, and yield the URL. Requests that are running at the end get
    `drain_s` to finish. The socket is closed."""
    is_local = is_loopback(sock.getsockname()[0])
    app.middlewares.insert(
        0, guard(is_local=is_local, allowed=allowed or AllowedClients(), refuse=app.get(REFUSE, _refuse))
    )
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=drain_s,
        handler_cancellation=is_cancelled_on_disconnect,
        read_bufsize=read_buffer_bytes,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield url_of(sock)
    finally:
        await runner.cleanup()


def for_any_name(path: str) -> str:
    """A path for aiohttp's router in which `{name}` also matches braces: ids of tasks and groups may have them."""
    return _NAME.sub(r"{\1:[^/]+}", path)


def _refuse(_: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    return web.json_response({"error": {"type": problem, "message": message}}, status=problem.status)
