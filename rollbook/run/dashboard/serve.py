"""`rollbook dashboard`: serves the page of one or more runs. Also the process that `rollbook train` starts next to a run."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rollbook.access.guard import AllowedClients
from rollbook.access.server import serve_app
from rollbook.access.tokens import read_or_create_token
from rollbook.contracts.errors import UsageError
from rollbook.dashboard.server.access import DashboardAccess, require_viewer_token
from rollbook.dashboard.server.app import build_app
from rollbook.dashboard.server.runs import open_runs
from rollbook.run.dashboard.address import open_socket
from rollbook.run.dashboard.catalog import open_catalog
from rollbook.run.directory import write_json


def serve_dashboard(
    target: str,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token_file: Path | None = None,
    operator_token_file: Path | None = None,
    allowed: AllowedClients | None = None,
    ready_file: Path | None = None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. The ready file then holds the address. Without an operator token runs can only be read."""
    viewer = None if token_file is None else read_or_create_token(token_file)
    operator = None if operator_token_file is None else read_or_create_token(operator_token_file)
    if viewer is not None and viewer == operator:
        raise UsageError("viewers and operators have the same token; name another file with --operator-token-file")
    require_viewer_token(host, viewer)
    # Before the socket: a wrong target must not look like a server.
    catalog = open_catalog(target, token=os.environ.get("ROLLBOOK_VIEWER_TOKENS") or None)
    sock = open_socket(host, port)

    async def serve() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.set)
        async with AsyncExitStack() as stack:
            runs = await stack.enter_async_context(open_runs(catalog, allows_actions=operator is not None))
            app = build_app(runs, DashboardAccess(viewer=viewer, operator=operator))
            url = await stack.enter_async_context(serve_app(app, sock, allowed=allowed))
            say(f"dashboard of {catalog.target}: {url}")
            if viewer is not None:
                say(f"open it with the token in {token_file}")
            if operator is not None:
                say(f"operators act on runs with the token in {operator_token_file}")
            if ready_file is not None:
                write_json(ready_file, {"url": url})
            await stopping.wait()

    asyncio.run(serve())
