"""Kill any process of a run: it recovers or resumes, no group is lost or trained twice, and the weights are the same bits."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from rollbook.contracts.errors import RunError
from rollbook.run.record import open_run
from tests.parts.run.small import CONFIG, STEPS, SmallRun, rollbook


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.stop()


def require_complete(run: SmallRun, *, steps: int = STEPS) -> None:
    """The audit passes, steps 1..N were trained once each, and a replay gives the recorded weights, bit for bit."""
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]
    assert audit["max_lag"] <= audit["max_head_offpolicy_versions"]
    with open_run(run.directory) as record:
        trained = [step.step for step in record.steps() if step.receipt == "acknowledged"]
        batched = [group.id for batch in record.batches(steps) for group in batch.groups]
    assert trained == list(range(1, steps + 1))
    assert len(batched) == len(set(batched))
    replayed = rollbook("replay", str(run.directory), "--verify", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["steps"] == steps


@pytest.mark.parametrize(
    "role",
    # The chaos test also kills the others, several times; here they are slow tests.
    ["trainer", *(pytest.param(role, marks=pytest.mark.slow) for role in ("policy", "ledger", "rollout", "worker"))],
)
def test_a_run_recovers_when_a_process_is_killed(run: SmallRun, role: str) -> None:
    run.start()
    run.until(lambda: run.step() >= 10, what="step 10")
    killed = run.kill(role)
    summary = run.wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert (summary["steps"], summary["audit"]) == (STEPS, "ok")
    assert not psutil.pid_exists(killed)
    assert summary["restarts"] == (0 if role == "worker" else 1)
    require_complete(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_another_program_terminates_are_started_again(run: SmallRun) -> None:
    run.start()
    for role in ("policy", "ledger", "rollout", "trainer"):
        run.until(partial(lambda step: run.step() > step, run.step()), what="a step")
        pid = run.until(partial(run.pid, role), what=f"{role} was up")
        os.kill(pid, signal.SIGTERM)
        run.until(
            partial(lambda role, pid: run.pid(role) not in (None, pid), role, pid), what=f"{role} was started again"
        )
    summary = run.wait()
    assert (summary["exit_code"], summary["end"], summary["steps"]) == (0, "finished", STEPS), summary["stderr"]
    assert summary["restarts"] == 4
    require_complete(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_every_process_at_once_drains_the_run_and_the_same_command_resumes(run: SmallRun) -> None:
    """As batch systems and systemd do before they kill."""
    run.start()
    run.until(lambda: run.step() >= 5, what="step 5")
    for process in [*run.descendants(), psutil.Process(run.process.pid)]:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    drained = run.wait()
    assert (drained["exit_code"], drained["end"]) == (0, "drained"), drained["stderr"]
    assert "Traceback" not in drained["stderr"]
    again = run.start().wait()
    assert (again["exit_code"], again["steps"]) == (0, STEPS), again["stderr"]
    require_complete(run)


TAILS = Path(__file__).parents[2] / "benchmarks" / "learning" / "tails_rollout.py"


@pytest.mark.parametrize(
    ("policy", "role"),
    [
        ("parts", "rollout"),
        *(
            pytest.param(policy, role, marks=pytest.mark.slow)
            for policy, role in (("parts", "worker"), ("parts", "ledger"), ("parts", "trainer"), ("trim", "trainer"))
        ),
    ],
)
def test_a_run_with_slow_episodes_and_masked_tokens_recovers_when_a_process_is_killed(
    tmp_path: Path, policy: str, role: str
) -> None:
    (tmp_path / TAILS.name).write_text(TAILS.read_text(encoding="utf-8"), encoding="utf-8")
    config = CONFIG.replace("delayed_number_guessing", "tails_rollout:TailedGuessing")
    config = config.replace("step_s = 0.02", "mean_s = 0.3, shape = 1.5")
    run = SmallRun(tmp_path, [f"gate.batch_policy={policy}", "trainer.max_steps=16"], config=config)
    try:
        run.start()
        run.until(lambda: run.step() >= 6, what="step 6")
        run.kill(role)
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, 16, "ok"), summary["stderr"]
    require_complete(run, steps=16)
    overview = rollbook("inspect", str(run.directory)).stdout
    assert re.search(r"^masked      [0-9.]+% of \d+ tokens of the last 16 steps", overview, re.MULTILINE), overview
    if policy == "parts":
        with open_run(run.directory) as record:
            trained = [group for batch in record.batches(16) for group in batch.groups]
        late = next(group for group in trained if group.part > 1)
        shown = rollbook("inspect", str(run.directory), late.id).stdout
        assert f"part {late.part}; its baseline are the rewards of the quorum" in shown
        assert all(group.baseline is not None and len(group.baseline) == 2 for group in trained)


def test_killing_the_supervisor_leaves_no_process_behind_and_the_same_command_resumes(run: SmallRun) -> None:
    run.start()
    run.until(lambda: run.step() >= 10, what="step 10")
    processes = run.descendants()
    assert len(processes) >= 5
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    with pytest.raises(RunError, match="was never decided"), open_run(run.directory) as record:
        list(record.batches(STEPS))
    summary = run.start().wait()
    assert (summary["exit_code"], summary["steps"]) == (0, STEPS), summary["stderr"]
    require_complete(run)


def test_the_first_interrupt_drains_to_a_checkpoint_and_the_same_command_resumes(run: SmallRun) -> None:
    run.start()
    run.until(lambda: run.step() >= 8, what="step 8")
    processes = run.descendants()
    run.process.send_signal(signal.SIGINT)
    summary = run.wait()
    assert (summary["exit_code"], summary["end"]) == (0, "drained"), summary["stderr"]
    assert 8 <= summary["steps"] < STEPS
    assert [p for p in processes if p.is_running()] == []
    checkpoints = sorted((run.directory / "checkpoints").iterdir())
    assert checkpoints[-1].name.endswith(f"{summary['steps']:06d}"), checkpoints
    again = run.start().wait()
    assert (again["exit_code"], again["steps"]) == (0, STEPS), again["stderr"]
    require_complete(run)


def test_a_second_train_on_a_running_directory_is_refused(run: SmallRun, tmp_path: Path) -> None:
    run.start()
    run.until(lambda: run.step() >= 1, what="step 1")
    second = rollbook("train", str(tmp_path / "run.toml"), "--run-dir", str(run.directory))
    assert second.returncode == 2
    assert "is in use by another" in second.stderr
    run.process.send_signal(signal.SIGINT)
    summary = run.wait()
    assert summary["exit_code"] == 0, summary["stderr"]
