"""`rollbook eval`: evaluates a checkpoint on held-out tasks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rollbook.cli.arguments import AsJson, Overrides
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.record.evaluate import evaluate, table

HEADINGS = ("", "tasks", "episodes", "solved [95 %]", "once", "reward [95 %]", "no score")


def eval_command(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run directory, or a model directory.")],
    *,
    config: Annotated[
        Path | None, typer.Option("--config", help="Tasks and environment; required for a model directory.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of a run; default: the newest.")] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="The split of the tasks to play.")] = None,
    episodes: Annotated[int | None, typer.Option("--episodes", min=1, help="Episodes of each task.")] = None,
    max_tasks: Annotated[int | None, typer.Option("--max-tasks", min=1, help="At most this many tasks.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--sampled", help="Greedy decoding, or sampling as in training.")
    ] = None,
    override: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="File for the result; default: in the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play held-out tasks with a checkpoint and print the results, overall and by label, with 95 % intervals."""
    result = evaluate(
        target,
        config=config,
        step=step,
        split=tasks,
        episodes=episodes,
        max_tasks=max_tasks,
        greedy=greedy,
        overrides=override or (),
        out=out,
    ).row()
    # This frame fits into 80 columns.
    shown = Table(
        title=escape(f"step {result['step']} of {target}"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for line in table(result):
        shown.add_row(*map(escape, line))
    stderr_console().print(shown)
    stderr_console().print(f"written to {result['file']}", markup=False, soft_wrap=True)
    if as_json:
        result_json(result)
