"""`rollbook simulate` with the trace of a real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts.run.small import REPOSITORY, SmallRun

pytestmark = pytest.mark.slow


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollbook", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def test_a_run_is_predicted_from_its_own_trace(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    assert run.start().wait()["end"] == "finished"
    config = str(tmp_path / "run.toml")

    # As the end of the run advises.
    done = simulate(str(run.directory), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prediction"]["steps_per_s"] > 0
    assert set(report["prediction"]["lag_shares"]) <= {"0", "1", "2"}
    assert sum(report["prediction"]["lag_shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert report["bottleneck"]

    picture = tmp_path / "frontier.svg"
    swept = simulate(
        config, "--trace", str(run.directory), "--vary", "gate.max_head_offpolicy_versions=0,2", "--out", str(picture)
    )
    assert swept.returncode == 0, swept.stderr
    assert "* gate.max_head_offpolicy_versions=0" in swept.stdout
    assert "<svg" in picture.read_text(encoding="utf-8")

    refused = simulate(config, "--trace", str(run.directory), "--vary", "gate.batch_policy=hurry")
    assert refused.returncode == 2
    assert "gate.batch_policy" in refused.stderr
