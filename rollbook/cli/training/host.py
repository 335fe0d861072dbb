"""`rollbook host`: a run without its trainer."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import Overrides
from rollbook.cli.output import EXIT_FAILED, print_error, stderr_console
from rollbook.commands.training.host import host as serve


def host(
    config: Annotated[Path, typer.Argument(help="The run's TOML file, or a run directory to resume.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run directory; an existing one is resumed.")
    ] = None,
    override: Overrides = None,
    parent_fd: Annotated[int | None, typer.Option("--parent-fd", hidden=True)] = None,
) -> None:
    """Run ledger, policy server, environments and rollout workers for an external trainer, such as TRL."""
    outcome = serve(config, run_dir=run_dir, overrides=override or (), parent_fd=parent_fd, console=stderr_console())
    if outcome.end == "failed":
        print_error(outcome.message)
        raise typer.Exit(EXIT_FAILED)
