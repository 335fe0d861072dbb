"""`rollbook replay`: train again from the record and compare weight digests."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import EXIT_FAILED, people, result_json
from rollbook.run.replaying import replay_run


def replay(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit non-zero when a digest differs from the recorded one.")
    ] = False,
    until: Annotated[int | None, typer.Option("--until", min=1, help="Stop after this step.")] = None,
) -> None:
    """Train the recorded batches again from the initial weights; writes nothing into the run."""
    report = replay_run(run, until=until)
    result_json(report)
    if report["diverged_at"] is None:
        people().print(f"{report['steps']} steps reproduced bit for bit", style="green")
    else:
        people().print(f"the weights differ from step {report['diverged_at']} on", style="red")
        if verify:
            raise typer.Exit(EXIT_FAILED)
