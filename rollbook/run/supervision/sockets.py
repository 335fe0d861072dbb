"""Serve an HTTP application on a socket that another process opened.

The supervisor binds the listening sockets and passes them to its servers. While a server restarts, its clients wait in the backlog
and no connection is refused.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from rollbook.concurrency.sockets import BACKLOG, url_of

DRAIN_S = 2.0
"""How long running requests may take when a server stops."""


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
