"""A whole run with two trainer ranks: it trains, recovers when the second rank is killed, and leaves no process behind."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.parts.concurrency.processes import descendants_running
from tests.parts.run.small import SmallRun

STEPS = 12


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, ["trainer.ranks=2", f"trainer.max_steps={STEPS}", 'telemetry.sinks=["tensorboard"]'])
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
