"""Arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

RunOrLedger = Annotated[
    str,
    typer.Argument(
        help="A run directory, or the address of a ledger: http://HOST:PORT or http://HOST:PORT/v1/runs/RUN."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line on stdout.")]
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight/--no-preflight",
        help="Before the start: load the tasks, play one episode with a canned answer, and score it.",
    ),
]


AllowActions = Annotated[
    bool, typer.Option("--allow-actions", help="Operators may act on the run from its page, with a token.")
]
Dashboard = Annotated[bool, typer.Option("--dashboard/--no-dashboard", help="Serve the page of the run while it runs.")]


def verb_group(text: str | None = None, *, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """A verb with sub-verbs. Its help is plain text: importing rich would take longer than the rest of `--help`."""
    return typer.Typer(
        help=text,
        cls=cls,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
    )


TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with the token for requests that steer the server; created if missing. Default on loopback: one file per user.",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="A further name under which clients reach the server; may be repeated."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin", help="An origin whose web pages may call the server; * allows all; may be repeated."
    ),
]


def is_address(run: str) -> bool:
    return run.startswith(("http://", "https://"))
