"""`rollbook replay`: runs the replay in a subprocess, so that the command line does not import torch."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import require_libraries
from rollbook.run.directory import RunDirectory


def replay_run(path: Path, *, until: int | None) -> dict[str, Any]:
    """Train the recorded batches again. The report has the digests and the first step where they differ."""
    RunDirectory(path.resolve()).read_manifest()
    return _run_replay(path, [] if until is None else ["--until", str(until)])


def retrain_run(
    path: Path, *, until: int | None, loss: str | None, overrides: Sequence[str], out: Path | None
) -> dict[str, Any]:
    """Train the recorded batches with the recorded and with another loss. The report compares both and names the plot."""
    RunDirectory(path.resolve()).read_manifest()
    arguments = [] if until is None else ["--until", str(until)]
    arguments += [] if loss is None else ["--loss", loss]
    arguments += [part for text in overrides for part in ("--set", text)]
    folder = out or path / "replays" / re.sub(r"[^A-Za-z0-9_.-]+", "-", loss or "settings")
    return _run_replay(path, [*arguments, "--out", str(folder)])


def _run_replay(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    require_libraries("torch", "transformers")
    command = python_command("rollbook.run.processes.replay", str(path), *arguments)
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"the replay of {path} failed:\n{done.stderr.strip()[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
