"""`rollbook train`: start a run, or go on with one."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import people, result_json
from rollbook.run.commands.train import train as launch
from rollbook.run.commands.train_summary import tell, verdict_row


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file, or an existing run directory to go on with.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run lives; the same directory again resumes.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON line on stdout.")] = False,
) -> None:
    """Train a policy asynchronously. The first Ctrl-C drains, the second stops at once; run it again to resume."""
    console = people()
    report = launch(config, run_dir=run_dir, overrides=override or (), console=console)
    tell(report, console)
    if as_json:
        result_json(verdict_row(report))
    raise typer.Exit(report.exit_code)
