"""`rollbook explain`: the life of a group, as sentences."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.places import RunOrLedger, is_address
from rollbook.cli.speaking import result
from rollbook.run.commands.serve_ledger import explain_elsewhere, explain_in_directory


def explain(
    run: RunOrLedger,
    group: Annotated[str, typer.Argument(help="The group's id; `rollbook inspect RUN --groups` lists them.")],
) -> None:
    """Tell who dispatched a group, with which versions, and why it was trained, dropped or refused."""
    for sentence in explain_elsewhere(run, group) if is_address(run) else explain_in_directory(Path(run), group):
        result(sentence)
