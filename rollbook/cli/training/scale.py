"""`rollbook scale`: more or fewer processes for a running run."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AsJson
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.training.scale import scale as change


def scale(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    requests: Annotated[list[str], typer.Argument(metavar="ROLE=NUMBER...", help="policy=2 rollout=3 env=1")],
    as_json: AsJson = False,
) -> None:
    """Set the number of policy servers, dispatchers and environment servers in addition to those that the run started with.

    The supervisor of the run starts what is missing. It removes the newest ones first, when they have finished their work.
    """
    console = stderr_console()
    result = change(run, requests, say=lambda text: console.print(text, markup=False, soft_wrap=True))
    if as_json:
        result_json(result)
