"""`rollbook plot`: draws the figures of a run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import result
from rollbook.commands.record.top import open_config
from rollbook.contracts.plugin import load_on_demand


class Format(StrEnum):
    PNG = "png"
    SVG = "svg"


def plot_run(run_dir: Path, out: Path | None, *, suffix: str) -> list[Path]:
    """Draw the figures of a run; returns their files."""
    directory, config = open_config(run_dir)
    draw = load_on_demand("rollbook.dashboard.plots:draw_plots")
    drawn: list[Path] = draw(
        directory.path,
        out or directory.plots,
        max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
        suffix=suffix,
    )
    return drawn


def plot_command(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="The run directory.")],
    out: Annotated[Path | None, Option("--out", help="The folder. Default: plots/ of the run directory.")] = None,
    form: Annotated[Format, Option("--format", help="png or svg.")] = Format.PNG,
) -> None:
    """Draw the figures of a run: reward and solve rate, policy, lag, timeline, mastery."""
    for path in plot_run(run, out, suffix=form.value):
        result(str(path))
