"""`rollbook demo`: trains a small policy on a laptop in minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import Overrides
from rollbook.cli.output import result_json, stderr_console
from rollbook.run.commands.init import RUN_FILE, TEMPLATES_DIR
from rollbook.run.commands.train import RunFailedError
from rollbook.run.commands.train import train as launch
from rollbook.run.commands.train_summary import summary_row


def demo(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="The run directory.")] = None,
    override: Overrides = None,
) -> None:
    """Train a small policy from scratch to guess numbers. `rollbook init NAME --template multi_turn` gives you its files."""
    config = TEMPLATES_DIR / "multi_turn" / RUN_FILE
    chosen = run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = ["run.name=number_guessing", *(override or ())]
    try:
        report = launch(config, run_dir=chosen, overrides=overrides, console=stderr_console(), preflight=False)
    except RunFailedError as error:
        report = error.report
    result_json({"demo": "number_guessing", **summary_row(report)})
    raise typer.Exit(report.exit_code)
