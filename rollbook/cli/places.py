"""Where a run is to be found: in its directory, or in a ledger that answers over HTTP."""

from typing import Annotated

import typer

RunOrLedger = Annotated[
    str,
    typer.Argument(
        help="A run directory, live or dead, or http://HOST:PORT or http://HOST:PORT/v1/runs/RUN of a ledger."
    ),
]


def is_address(place: str) -> bool:
    return place.startswith(("http://", "https://"))
