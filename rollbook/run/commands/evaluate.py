"""`rollbook eval`: finds the weights and the tasks. The evaluation runs in a subprocess, so that this process needs no torch."""

import dataclasses
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import require_libraries
from rollbook.run.config.evaluation import EvaluationRequest
from rollbook.run.directory import RunDirectory, write_json

CHECKPOINT = re.compile(r"step-(\d+)")


def evaluate(
    target: Path, *, config: Path | None, step: int | None, overrides: Sequence[str], out: Path | None
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run, or a model with the tasks of a config file. The result is also written as JSON."""
    require_libraries("torch", "transformers")
    request = evaluation_request(target, config=config, step=step, overrides=overrides)
    done = subprocess.run(
        python_command("rollbook.run.processes.evaluate"),
        env=python_environment(),
        input=json.dumps(dataclasses.asdict(request)),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RunError(f"the evaluation of {target} failed with exit code {done.returncode}; see its output above")
    result: dict[str, Any] = {"target": str(target), "model": request.model_dir, **json.loads(lines[-1])}
    path = out or _home(target) / f"step-{request.step:06d}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return {**result, "file": str(path)}


def evaluation_request(
    target: Path, *, config: Path | None, step: int | None, overrides: Sequence[str]
) -> EvaluationRequest:
    """Find the weights and the configuration."""
    if (target / "run.json").is_file():
        directory = RunDirectory(target.resolve())
        model_dir, found = checkpoint_model(directory, step)
        return EvaluationRequest(
            config=str(config or directory.config_file),
            source_dir=str(config.parent.resolve() if config else directory.read_manifest()["source_dir"]),
            model_dir=str(model_dir),
            step=found,
            overrides=list(overrides),
        )
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
        model_dir=path,
        step=0,
        # Replaces the model of the config, also a built one.
        overrides=[*overrides, f"model={{path = {json.dumps(path)}}}"],
    )


def checkpoint_model(directory: RunDirectory, step: int | None) -> tuple[Path, int]:
    """The model of a step: 0 is the initial model, None the newest checkpoint."""
    kept = {
        int(match[1]): path / "model"
        for path in directory.checkpoints.glob("step-*")
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / "checkpoint.json").is_file()
    }
    wanted = max(kept, default=0) if step is None else step
    if wanted == 0:
        return directory.initial_model, 0
    if wanted not in kept:
        known = ", ".join(map(str, [0, *sorted(kept)]))
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
