"""`rollbook.evaluate` and `rollbook eval`: find the weights and the tasks.

The evaluation runs in a subprocess, so that this process needs no torch.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rollbook.commands.arguments import Argument, AsJson, Option, Overrides
from rollbook.commands.output import result_json, say, stderr_console
from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.decoding import convert
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import require_libraries
from rollbook.rollout.evaluation import LabelResult, TaskResult
from rollbook.run.config.evaluation import WARNING, EvaluationRequest
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.user_modules import recorded_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The result of an evaluation. It is also in `file`, as JSON."""

    target: Path
    model: Path
    """The evaluated weights."""
    step: int
    seconds: float
    pinned_ratio: float
    """Fraction of the tasks whose tokens all came from the evaluated weights."""
    results: tuple[LabelResult, ...]
    """The result over all tasks, then by label."""
    tasks: tuple[TaskResult, ...]
    """One result for each task: two evaluations can be compared task by task."""
    file: Path

    @property
    def overall(self) -> LabelResult:
        return self.results[0]

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**plain, "results": [result.row() for result in self.results]}


def evaluate(
    target: str | Path,
    *,
    config: str | Path | None = None,
    step: int | None = None,
    split: str | None = None,
    episodes: int | None = None,
    max_tasks: int | None = None,
    greedy: bool | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
) -> EvaluationReport:
    """Play held-out tasks with a checkpoint of a run, or with a model directory and the tasks of a config file.

    `target` is a run directory or a model directory; a model directory needs `config`. `step` chooses a checkpoint: 0 is the
    initial model, None the newest one. `split`, `episodes`, `max_tasks` and `greedy` replace settings of `[evaluation]`;
    `overrides` are like `--set`. The result is written to `out`, by default into `evaluations/`.
    """
    require_libraries("torch", "transformers")
    target = Path(target)
    chosen = {"split": split, "episodes": episodes, "max_tasks": max_tasks, "greedy": greedy}
    request = evaluation_request(
        target,
        config=None if config is None else Path(config),
        step=step,
        overrides=[
            *overrides,
            *(f"evaluation.{name}={json.dumps(value)}" for name, value in chosen.items() if value is not None),
        ],
    )
    path = Path(out or _home(target) / f"step-{request.step:06d}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    # Before the episodes are played: an evaluation may take an hour.
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise RunError(f"the result cannot be written: {place} is not a writable directory; name a file with --out")
    done = subprocess.run(
        python_command("rollbook.run.processes.evaluations.evaluate"),
        env=python_environment(),
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RunError(f"the evaluation of {target} failed:\n{done.stderr.strip()[-2000:].removeprefix('error: ')}")
    for line in done.stderr.splitlines():
        if line.startswith(WARNING):
            say(line)
    found = {"target": target, "model": Path(request.model_dir), **json.loads(lines[-1]), "file": path}
    report = convert(found, EvaluationReport)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report.row())
    return report


def evaluation_request(
    target: Path, *, config: Path | None, step: int | None, overrides: Sequence[str]
) -> EvaluationRequest:
    """Find the weights and the configuration."""
    if (target / "run.json").is_file():
        directory = RunDirectory(target.resolve())
        model_dir, found = checkpoint_model(directory, step)
        # A config of the caller is evaluated with the caller's code.
        modules, note = recorded_modules(directory) if config is None else ([], None)
        if note is not None:
            say(f"{note}; name the config file with --config to use the present code")
        return EvaluationRequest(
            config=str(config or directory.config_file),
            source_dir=str(config.parent.resolve() if config else directory.source_dir),
            search_path=[str(path) for path in (*directory.search_path, Path.cwd())],
            model_dir=str(model_dir),
            step=found,
            overrides=list(overrides),
            modules=list(map(str, modules)),
        )
    if not target.exists():
        raise RunDirectory(target.resolve()).no_run("")
    if not (target / "config.json").is_file():
        raise RunError(f"{target} is neither a run directory (run.json) nor a model directory (config.json)")
    if config is None:
        raise RunError(
            f"{target} is a model directory: --config run.toml is required for the tasks and the environment"
        )
    if step is not None:
        raise RunError(f"{target} is a model directory: --step works with a run directory only")
    path = str(target.resolve())
    return EvaluationRequest(
        config=str(config),
        source_dir=str(config.parent.resolve()),
        search_path=[str(Path.cwd())],
        model_dir=path,
        step=0,
        # Replaces the model of the config, even if the run built it.
        overrides=[*overrides, f"model={{path = {json.dumps(path)}}}"],
    )


def checkpoint_model(directory: RunDirectory, step: int | None) -> tuple[Path, int]:
    """The model of a step: 0 is the initial model, None the newest checkpoint."""
    kept = directory.checkpoint_models()
    wanted = max(kept) if step is None else step
    if wanted not in kept:
        known = ", ".join(map(str, sorted(kept)))
        raise RunError(f"{directory.path} has no checkpoint of step {wanted}; available steps: {known}")
    return kept[wanted], wanted


def _home(target: Path) -> Path:
    return target / "evaluations" if (target / "run.json").is_file() else Path("evaluations")


def table(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of text: label, tasks, episodes, solved and reward with their intervals, solved at least once, unscorable."""
    return [
        (
            str(row["label"]),
            str(row["tasks"]),
            str(row["episodes"]),
            _interval(row["solved"], percent=True),
            "–" if row["solved_once"] is None else f"{row['solved_once']['mean']:.1%}",
            _interval(row["reward"]),
            str(row["unscorable"]),
        )
        for row in result["results"]
    ]


def _interval(share: Mapping[str, float] | None, *, percent: bool = False) -> str:
    if share is None:
        return "–"
    if percent:
        return f"{share['mean']:.1%} [{share['low']:.0%}–{share['high']:.0%}]"
    return f"{share['mean']:.3f} [{share['low']:.2f}–{share['high']:.2f}]"


HEADINGS = ("", "tasks", "episodes", "solved [95 %]", "once", "reward [95 %]", "no score")


def eval_command(
    target: Annotated[Path, Argument(metavar="RUN_OR_MODEL", help="A run directory, or a model directory.")],
    *,
    config: Annotated[
        Path | None, Option("--config", help="Tasks and environment; required for a model directory.")
    ] = None,
    step: Annotated[int | None, Option("--step", min=0, help="Checkpoint of a run; default: the newest.")] = None,
    tasks: Annotated[str | None, Option("--tasks", help="The split of the tasks to play.")] = None,
    episodes: Annotated[int | None, Option("--episodes", min=1, help="Episodes of each task.")] = None,
    max_tasks: Annotated[int | None, Option("--max-tasks", min=1, help="At most this many tasks.")] = None,
    greedy: Annotated[
        bool | None, Option("--greedy/--sampled", help="Greedy decoding, or sampling as in training.")
    ] = None,
    override: Overrides = None,
    out: Annotated[Path | None, Option("--out", help="File for the result; default: in the run.")] = None,
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
    say(f"written to {result['file']}")
    if as_json:
        result_json(result)
