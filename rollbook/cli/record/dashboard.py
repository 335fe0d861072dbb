"""`rollbook dashboard`: shows runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.access.guard import AllowedClients
from rollbook.access.tokens import user_token_file
from rollbook.cli.arguments import AllowActions, AllowHost, AllowOrigin
from rollbook.cli.output import stderr_console
from rollbook.run.dashboard.serve import serve_dashboard


def dashboard(  # noqa: PLR0917 - a command line is a list of flags
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|FOLDER|LEDGER_URL",
            help="A run directory, a folder with run directories, or the address of a ledger.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="Addresses other than loopback need --token-file.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Default: 8686, or any free one if it is in use.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token that a person must enter; created if missing."),
    ] = None,
    allow_actions: AllowActions = False,
    operator_token_file: Annotated[
        Path | None,
        typer.Option(
            "--operator-token-file",
            help="With --allow-actions: file with the token of operators; created if missing. Default: one for your user.",
        ),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written with the address once the server is ready.")
    ] = None,
) -> None:
    """Show runs in a browser: live, finished or crashed. The token of a remote ledger is read from ROLLBOOK_VIEWER_TOKENS."""
    console = stderr_console()
    serve_dashboard(
        target,
        host=host,
        port=port,
        token_file=token_file,
        operator_token_file=operator_token_file or user_token_file("operator-token") if allow_actions else None,
        allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
        ready_file=ready_file,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
