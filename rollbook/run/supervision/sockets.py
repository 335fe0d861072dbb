"""Serve an HTTP application on a socket that another process opened.

The supervisor binds the listening sockets and passes them to its servers. While a server restarts, its clients wait in the backlog
and no connection is refused.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

# Connections that may wait while a server restarts: one for each of some hundred concurrent episodes, and more.
BACKLOG = 4096
DRAIN_S = 2.0
"""How long running requests may take when a server stops."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 lets the kernel choose."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(BACKLOG)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(app: web.Application, sock: socket.socket, *, drain_s: float = DRAIN_S) -> AsyncIterator[str]:
    """Serve requests while the block runs; then give running requests `drain_s` to finish."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=drain_s, handler_cancellation=True)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield url_of(sock)
    finally:
        await runner.cleanup()
