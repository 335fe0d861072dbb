"""`rollbook study`: trains grids of settings and compares them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rollbook.cli.arguments import AsJson, Overrides
from rollbook.cli.output import result, result_json, stderr_console
from rollbook.commands.training.study import study as run_study
from rollbook.commands.training.study_report import HEADINGS, table
from rollbook.run.config.study import load_study

SHOWN_COLUMNS = 5


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A run config, a grid of settings, and seeds.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The directory of the study; default: runs/NAME. An existing one is resumed."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs that are trained at once.")] = 1,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PATTERN", help="Only cells whose name matches, such as '*dapo*'.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="Stop after this time; the same command continues.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and list the cells.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Train nothing: write the report of what is there.")] = False,
    override: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train every combination of a grid with every seed, and compare them: means with intervals, as a table and as SVG.

    Finished runs are kept and others resumed, so the same command continues a study. The first Ctrl-C lets the running ones write
    a checkpoint, the second stops at once.
    """
    if dry_run:
        for cell in load_study(file, override or ()).cells:
            if as_json:
                result_json({"cell": cell.name, "seed": cell.seed, "settings": list(cell.overrides)})
            else:
                result(f"{cell.name}  seed {cell.seed}  {' '.join(cell.overrides)}")
        return
    found = run_study(
        file,
        out=out,
        jobs=jobs,
        only=only,
        minutes=minutes,
        overrides=override or (),
        trains=not report,
        console=stderr_console(),
        on_result=result_json if as_json else lambda row: None,
    )
    # The columns after these are in the report: a terminal is too narrow.
    shown = Table(title=escape(f"{found.results.measure} of {file}"), title_justify="left")
    for number, heading in enumerate(HEADINGS[:SHOWN_COLUMNS]):
        shown.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for line in table(found.results):
        shown.add_row(*map(escape, line[:SHOWN_COLUMNS]))
    stderr_console().print(shown)
    for path in found.files:
        stderr_console().print(f"written: {path}", markup=False, soft_wrap=True)
    if found.is_interrupted:
        stderr_console().print(f"stopped: {len(found.unfinished)} runs are not finished; the same command continues")
    if as_json:
        result_json(found.row())
    raise typer.Exit(found.exit_code)
