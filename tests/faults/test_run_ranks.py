"""A whole run with two trainer ranks: it trains, recovers when the second rank is killed, and leaves no process behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollbook.run.directory import RunDirectory
from tests.parts.concurrency.processes import descendants_running
from tests.parts.run.small import REPOSITORY, SmallRun

STEPS = 12
JOINED_STEPS = 40
"""Long enough that telemetry arrives before the end: it is sent every two seconds."""


@pytest.fixture(params=[[], ["trainer.lora.rank=4"]], ids=["all weights", "adapters"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    settings = ["trainer.ranks=2", f"trainer.max_steps={STEPS}", 'telemetry.sinks=["tensorboard"]', *request.param]
    run = SmallRun(tmp_path, settings)
    yield run
    run.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_two_ranks_recovers_when_the_second_is_killed(run: SmallRun) -> None:
    run.start()
    run.until(lambda: run.step() >= 3, what="step 3")
    followers = descendants_running("rollbook.trainer.team", of=run.process.pid)
    assert followers, "rank 1 is a child of the trainer"
    for follower in followers:
        follower.kill()
    summary = run.wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert (summary["steps"], summary["audit"]) == (STEPS, "ok")
    assert not any(psutil.pid_exists(p.pid) and p.is_running() for p in followers)
    assert list((run.directory / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_joined_the_run_is_killed_and_joins_again(tmp_path: Path) -> None:
    settings = ["trainer.ranks=2", "cluster.ranks=1", f"trainer.max_steps={JOINED_STEPS}", "trainer.checkpoint_every=4"]
    run = SmallRun(tmp_path, settings).start()
    run.until((run.directory / "ranks.json").exists, what="the trainer waits for its second rank")
    command = [sys.executable, "-m", "rollbook", "join", str(run.directory), "--role", "rank", "--name", "second"]
    with (tmp_path / "join").open("w") as output:
        joining = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        require_telemetry(run, "second")
        (rank,) = descendants_running("rollbook.run.supervision.child_main", of=joining.pid)
        rank.kill()
        summary = run.wait()
        assert summary["exit_code"] == 0, summary["stderr"]
        assert (summary["steps"], summary["audit"]) == (JOINED_STEPS, "ok")
        assert joining.wait(60) == 0, (tmp_path / "join").read_text()
        assert not (run.directory / "ranks.json").exists()
    finally:
        run.stop()
        joining.kill()
        joining.wait()


def require_telemetry(run: SmallRun, name: str) -> None:
    """What the rank wrote on its machine is in the run directory."""
    local, arrived = (
        RunDirectory(run.directory).on_this_machine(name).log_file(name),
        run.directory / "logs" / f"{name}.jsonl",
    )
    assert "rank.joined" in local.read_text(encoding="utf-8")
    run.until(lambda: arrived.exists() and "rank.joined" in arrived.read_text(encoding="utf-8"), what="its log arrived")
