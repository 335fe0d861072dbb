"""`rollbook dashboard`: serves the page of one or more runs."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from rollbook.access.guard import AllowedClients
from rollbook.access.server import serve_app
from rollbook.access.tokens import read_or_create_token, user_token_file
from rollbook.commands.arguments import AllowActions, AllowHost, AllowOrigin, Argument, Option, ReadyFile
from rollbook.commands.output import say
from rollbook.contracts.errors import UsageError
from rollbook.dashboard.server.access import DashboardAccess, require_viewer_token
from rollbook.dashboard.server.app import build_app
from rollbook.dashboard.server.runs import open_runs
from rollbook.run.catalog import open_catalog
from rollbook.run.directory import write_json
from rollbook.run.supervision.plan import open_dashboard_socket


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
    sock = open_dashboard_socket(host, port)

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


def dashboard_command(  # noqa: PLR0917 - a command line is a list of flags
    target: Annotated[
        str,
        Argument(
            metavar="RUN_DIR|FOLDER|LEDGER_URL",
            help="A run directory, a folder with run directories, or the address of a ledger.",
        ),
    ],
    host: Annotated[str, Option("--host", help="Addresses other than loopback need --token-file.")] = "127.0.0.1",
    port: Annotated[
        int | None, Option("--port", min=0, max=65535, help="Default: 8686, or any free one if it is in use.")
    ] = None,
    token_file: Annotated[
        Path | None,
        Option("--token-file", help="File with the token that a person must enter; created if missing."),
    ] = None,
    allow_actions: AllowActions = False,
    operator_token_file: Annotated[
        Path | None,
        Option(
            "--operator-token-file",
            help="With --allow-actions: file with the token of operators; created if missing. Default: one for your user.",
        ),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Show runs in a browser: live, finished or crashed. The token of a remote ledger is read from ROLLBOOK_VIEWER_TOKENS."""
    serve_dashboard(
        target,
        host=host,
        port=port,
        token_file=token_file,
        operator_token_file=operator_token_file or user_token_file("operator-token") if allow_actions else None,
        allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
        ready_file=ready_file,
        say=say,
    )
