"""`rollbook demo`: the whole system on a laptop, in minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import EXIT_MISUSED, people, result_json, say_error
from rollbook.run.commands.train import train as launch
from rollbook.run.commands.train_summary import tell, verdict_row

EXAMPLE = Path("examples/01_number_guessing/run.toml")


def demo(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Where the run lives.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
) -> None:
    """Train a small policy from scratch to guess numbers, while rollouts and training overlap."""
    config = Path(__file__).parents[2] / EXAMPLE
    if not config.exists():
        say_error(f"{EXAMPLE} was not found: the demo runs from a clone of the repository")
        raise typer.Exit(EXIT_MISUSED)
    console = people()
    chosen = run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    report = launch(config, run_dir=chosen, overrides=override or (), console=console)
    tell(report, console)
    result_json({"demo": "number_guessing", **verdict_row(report)})
    raise typer.Exit(report.exit_code)
