"""`rollbook inspect`: shows a run, its groups, or one group token by token."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.output import result
from rollbook.commands.record.inspect import group_lines, groups_lines, overview_lines
from rollbook.run.reader import open_run


def inspect(  # noqa: PLR0917 - a command line is a list of flags
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    group: Annotated[str | None, typer.Argument(help="A group id: shows its history and its samples.")] = None,
    groups: Annotated[bool, typer.Option("--groups", help="List groups.")] = False,
    state: Annotated[str | None, typer.Option("--state", help="With --groups: only those in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="With --groups: how many.")] = 40,
    start: Annotated[int, typer.Option("--from", min=0, help="With --groups: the first sequence number.")] = 0,
) -> None:
    """Show a run, its groups, or one group with every token, logprob and version."""
    with open_run(run) as record:
        if group is not None:
            lines = group_lines(record, group)
        elif groups or state is not None:
            lines = groups_lines(record, state=state, limit=limit, start=start)
        else:
            lines = overview_lines(record)
        for line in lines:
            result(line)
