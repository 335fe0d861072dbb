"""`rollbook demo`: trains a small policy on a laptop in minutes."""

import time
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import AsJson, Dashboard, Option, Overrides
from rollbook.commands.output import result_json, say, stderr_console
from rollbook.commands.training.train import RunFailedError, train
from rollbook.commands.training.train_summary import summary_row

CONFIG = Path(__file__).parents[2] / "demo" / "run.toml"


def demo_command(
    run_dir: Annotated[Path | None, Option("--run-dir", help="The run directory.")] = None,
    override: Overrides = None,
    dashboard: Dashboard = True,
    as_json: AsJson = False,
) -> int:
    """Train a small policy from scratch to guess numbers. `rollbook init NAME --template multi_turn` starts a project like it."""
    chosen = run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        report = train(
            CONFIG,
            run_dir=chosen,
            overrides=override or (),
            console=stderr_console(),
            preflight=False,
            dashboard=dashboard,
        )
    except RunFailedError as error:
        report = error.report
    if as_json:
        result_json({"demo": "number_guessing", **summary_row(report)})
    else:
        say(f"\nlook at it: rollbook dashboard {chosen}, or rollbook inspect {chosen}")
    return report.exit_code
