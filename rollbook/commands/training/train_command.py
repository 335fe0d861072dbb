"""`rollbook train`: starts the process template, and then loads the modules that check and supervise the run.

The template takes seconds to import torch and transformers, which every run needs, and those modules another one.
"""

import json
import time
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import AllowActions, Argument, AsJson, Dashboard, Option, Overrides, UsePreflight
from rollbook.concurrency.child_process.template import early_template
from rollbook.contracts.plugin import load_on_demand

OF_EVERY_RUN = ["rollbook.run.processes.trainer"]
"""It imports nearly all that the template of a run imports."""


def train_command(  # noqa: PLR0917 - a command line is a list of flags
    config: Annotated[Path, Argument(help="The run's TOML file, or a run directory to resume.")],
    run_dir: Annotated[Path | None, Option("--run-dir", help="The run directory; an existing one is resumed.")] = None,
    override: Overrides = None,
    max_rows: Annotated[
        int | None, Option("--max-rows", min=1, help="Use only the first rows of the task source (tasks.limit).")
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            "--cluster",
            metavar="auto|ADDRESS",
            help="Place additional processes on a Ray cluster (cluster.ray.address).",
        ),
    ] = None,
    preflight: UsePreflight = True,
    dashboard: Dashboard = True,
    allow_actions: AllowActions = False,
    as_json: AsJson = False,
) -> int:
    """Train a policy asynchronously. The first Ctrl-C drains, the second stops at once; `rollbook train RUN_DIR` resumes."""
    began = time.monotonic()
    with early_template(OF_EVERY_RUN) as early:
        code: int = load_on_demand("rollbook.commands.training.train:train_in_terminal")(
            config,
            run_dir=run_dir,
            overrides=[
                *(override or ()),
                *([] if max_rows is None else [f"tasks.limit={max_rows}"]),
                *([] if cluster is None else [f"cluster.ray.address={json.dumps(cluster)}"]),
            ],
            preflight=preflight,
            dashboard=dashboard,
            allow_actions=allow_actions,
            as_json=as_json,
            began=began,
            early=early,
        )
    return code
