"""`rollbook train`: starts or resumes a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AllowActions, AsJson, Dashboard, Overrides, Preflight
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.training.train import RunFailedError
from rollbook.commands.training.train import train as launch
from rollbook.commands.training.train_summary import summary_row


def train(  # noqa: PLR0917 - a command line is a list of flags
    config: Annotated[Path, typer.Argument(help="The run's TOML file, or a run directory to resume.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run directory; an existing one is resumed.")
    ] = None,
    override: Overrides = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", min=1, help="Use only the first rows of the task source (tasks.limit).")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="auto|ADDRESS",
            help="Place additional processes on a Ray cluster (cluster.ray.address).",
        ),
    ] = None,
    preflight: Preflight = True,
    dashboard: Dashboard = True,
    allow_actions: AllowActions = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy asynchronously. The first Ctrl-C drains, the second stops at once; `rollbook train RUN_DIR` resumes."""
    try:
        report = launch(
            config,
            run_dir=run_dir,
            overrides=[
                *(override or ()),
                *([] if max_rows is None else [f"tasks.limit={max_rows}"]),
                *([] if cluster is None else [f"cluster.ray.address={json.dumps(cluster)}"]),
            ],
            console=stderr_console(),
            preflight=preflight,
            dashboard=dashboard,
            allow_actions=allow_actions,
        )
    except RunFailedError as error:
        report = error.report
    if as_json:
        result_json(summary_row(report))
    raise typer.Exit(report.exit_code)
