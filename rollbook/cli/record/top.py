"""`rollbook top` and `rollbook plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.output import result, stderr_console
from rollbook.run.dashboard.top import plot_run, show_top

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")]


class Format(StrEnum):
    PNG = "png"
    SVG = "svg"


def top(
    run: RunDirectory,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show the live panel of a run that was started elsewhere. Ctrl-C ends the view; the run continues."""
    show_top(run, stderr_console(), once=once)


def plot(
    run: RunDirectory,
    out: Annotated[Path | None, typer.Option("--out", help="The folder. Default: plots/ of the run directory.")] = None,
    form: Annotated[Format, typer.Option("--format", help="png or svg.")] = Format.PNG,
) -> None:
    """Draw the figures of a run: reward and solve rate, policy, lag, timeline, mastery."""
    for path in plot_run(run, out, suffix=form.value):
        result(str(path))
