"""Arguments that several verbs share."""

from typing import Annotated

import typer

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
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight/--no-preflight",
        help="Before the start: load the tasks, play one episode with a canned answer, and score it.",
    ),
]


def is_address(run: str) -> bool:
    return run.startswith(("http://", "https://"))
