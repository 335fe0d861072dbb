"""Serve an HTTP application on a socket that somebody else opened.

The supervisor binds the listening sockets and hands them to its servers, so that a server that dies and comes back finds its
clients waiting in the backlog: nobody ever meets a refused connection.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

# Connections that may wait while a server restarts: one for each of some hundred concurrent episodes.
BACKLOG = 4096
DRAIN_S = 2.0
"""What is under way when a server is asked to stop gets this long to end."""


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
    """Answer requests while the block runs; then let what is under way end, for at most `drain_s`."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=drain_s, handler_cancellation=True)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield url_of(sock)
    finally:
        await runner.cleanup()
