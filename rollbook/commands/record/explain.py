"""`rollbook explain`: the history of a group, as sentences."""

import os
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, RunOrLedger, is_address
from rollbook.commands.output import result
from rollbook.contracts.group import GroupId
from rollbook.ledger.client.blocking import explain_at
from rollbook.run.reader import open_run


def explain_command(
    run: RunOrLedger,
    group: Annotated[str, Argument(help="The group's id; `rollbook inspect RUN --groups` lists them.")],
) -> None:
    """Explain when and by which process a group was dispatched, its versions, and why it was trained, dropped or rejected."""
    if is_address(run):
        sentences = explain_at(run, GroupId(group), token=os.environ.get("ROLLBOOK_VIEWER_TOKENS")).sentences
    else:
        with open_run(Path(run)) as record:
            sentences = record.explain(GroupId(group)).sentences
    for sentence in sentences:
        result(sentence)
