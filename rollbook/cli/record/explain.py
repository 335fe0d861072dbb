"""`rollbook explain`: the history of a group, as sentences."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import RunOrLedger, is_address
from rollbook.cli.output import result
from rollbook.commands.servers.ledger import explain_in_directory, explain_remote


def explain(
    run: RunOrLedger,
    group: Annotated[str, typer.Argument(help="The group's id; `rollbook inspect RUN --groups` lists them.")],
) -> None:
    """Explain when and by which process a group was dispatched, its versions, and why it was trained, dropped or rejected."""
    for sentence in explain_remote(run, group) if is_address(run) else explain_in_directory(Path(run), group):
        result(sentence)
