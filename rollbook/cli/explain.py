"""`rollbook explain`: the life of a group, as sentences."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import result
from rollbook.run.ledger_serving import explain_in_directory


def explain(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    group: Annotated[str, typer.Argument(help="The group's id; `rollbook inspect RUN --groups` lists them.")],
) -> None:
    """Tell who dispatched a group, with which versions, and why it was trained, dropped or refused."""
    for sentence in explain_in_directory(run, group):
        result(sentence)
