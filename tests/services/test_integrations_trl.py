"""TRL's AsyncGRPOTrainer in its own virtual environment: on Rollbook's rollouts, killed and resumed, and with its own worker."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.group import GroupState
from rollbook.run.reader import open_run

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "trl" / "bin" / "python"
STEPS = 12
ROWS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-trl installs TRL"),
    pytest.mark.timeout(600),
]


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return subprocess.Popen([str(PYTHON), *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def train(run_dir: Path, *options: str) -> subprocess.Popen[str]:
    return start("examples/06_trl/train.py", "--run-dir", str(run_dir), "--steps", str(STEPS), *options)


def printed_by(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith('{"'):
                yield json.loads(line)


def groups_by_state(run_dir: Path) -> dict[str, str]:
    with open_run(run_dir) as run:
        return {group.group_id: group.state for group in run.groups(limit=1000)}


def assert_all_groups_were_trained_once(run_dir: Path) -> None:
    states = groups_by_state(run_dir)
    with open_run(run_dir) as run:
        report = run.audit()
    assert report.ok, report.violations
    assert list(states.values()) == [GroupState.DURABLE] * (STEPS * ROWS // 4)


def test_trl_on_our_workers_has_ratio_one_and_drops_no_sample_while_its_own_worker_drops_most(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = train(tmp_path / "ours", "--step-s", "0.5")
    lines = list(printed_by(process))
    assert process.wait(60) == 0
    steps = [line for line in lines if "ratio" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=5e-4)
    assert sum(line["dropped_stale"] for line in steps) == 0
    assert max(line["sample/staleness_max"] for line in steps) <= 2
    assert lines[-1]["done"] == STEPS
    assert_all_groups_were_trained_once(tmp_path / "ours")

    alone = start("-m", "tests.parts.integrations.trl_alone", str(tmp_path / "alone"), str(STEPS), "0.5")
    counted = list(printed_by(alone))[-1]
    assert alone.wait(60) == 0
    dropped, kept = sum(counted["dropped_by_step"]), STEPS * counted["samples_per_step"]
    with capfd.disabled():
        print(  # noqa: T201 - the result of this test
            f"\nTRL with our worker: ratio {steps[0]['ratio']:.4f} at step 1, 0 of {kept} samples dropped as stale; "
            f"TRL alone: {dropped:.0f} of {dropped + kept:.0f} dropped ({dropped / (dropped + kept):.0%})"
        )
    assert dropped > kept, "TRL alone drops most samples; if that changes, update docs/agents.md"


def test_two_training_processes_train_each_batch_of_the_ledger_together(tmp_path: Path) -> None:
    """`torchrun`, which `accelerate launch` uses too, with gloo on a CPU."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    process = start(*launcher, "examples/06_trl/train.py", "--run-dir", str(tmp_path / "run"), "--steps", str(STEPS))
    lines = list(printed_by(process))
    assert process.wait(60) == 0
    steps = [line for line in lines if "ratio" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=5e-4)
    assert sum(line["dropped_stale"] for line in steps) == 0
    assert (lines[-1]["done"], lines[-1]["divergences"]) == (STEPS, 0)
    assert_all_groups_were_trained_once(tmp_path / "run")


def test_a_killed_trl_run_resumes_and_delivers_the_groups_that_were_queued_or_in_flight(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # Slow environments, so that groups are in flight at the kill.
    slow = ["--set", "env.name=delayed_number_guessing", "--set", "env.args={max_turns=4,step_s=0.05}"]
    first = train(run_dir, "--step-s", "0.3", *slow)
    before = []
    for line in printed_by(first):
        before.append(line)
        if line.get("step") == 5:
            os.kill(first.pid, signal.SIGKILL)
    first.wait(60)
    states = groups_by_state(run_dir)
    waiting = {group for group, state in states.items() if state in (GroupState.QUEUED, GroupState.DISPATCHED)}
    undurable = {group for group, state in states.items() if state in (GroupState.BATCHED, GroupState.TRAINED)}
    assert waiting, "no group was in flight at the kill, so the test proves nothing"
    assert undurable, "no group was trained since the checkpoint, so the test proves nothing"

    second = train(run_dir, *slow)
    after = list(printed_by(second))
    assert second.wait(60) == 0
    assert after[0]["resumed_from"].endswith("checkpoint-4")
    steps = [line for line in after if "ratio" in line]
    assert [line["step"] for line in steps] == list(range(5, STEPS + 1))
    assert sum(line["dropped_stale"] for line in steps) == 0
    assert after[-1]["dropped"] == {}
    assert waiting | undurable <= groups_by_state(run_dir).keys()
    assert_all_groups_were_trained_once(run_dir)
