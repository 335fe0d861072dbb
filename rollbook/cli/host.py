"""`rollbook host`: everything of a run but its trainer."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import EXIT_FAILED, people, say_error
from rollbook.run.commands.host import host as serve


def host(
    config: Annotated[Path, typer.Argument(help="The run's TOML file, or an existing run directory to go on with.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run lives; the same directory again resumes.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
    parent_fd: Annotated[int | None, typer.Option("--parent-fd", hidden=True)] = None,
) -> None:
    """Run ledger, policy server, worlds and rollout workers for a trainer of your own, such as TRL's."""
    outcome = serve(config, run_dir=run_dir, overrides=override or (), parent_fd=parent_fd, console=people())
    if outcome.end == "failed":
        say_error(outcome.message)
        raise typer.Exit(EXIT_FAILED)
