"""Replay in a process of its own: the command line stays free of torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.run.directory import RunDirectory


def replay_run(path: Path, *, until: int | None) -> dict[str, Any]:
    """Train the recorded batches again; the answer has the digests and the first step where they differ."""
    RunDirectory(path.resolve()).read_manifest()
    command = [sys.executable, "-m", "rollbook.run.processes.replay", str(path)]
    command += [] if until is None else ["--until", str(until)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"the replay of {path} failed:\n{done.stderr.strip()[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
