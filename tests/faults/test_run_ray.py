"""A run that places policy servers and dispatchers on a Ray cluster."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.contracts.admission import MemberRole
from tests.faults.test_run_join import SETTINGS, groups_of, members
from tests.parts.run.small import SmallRun, rollbook

pytest.importorskip("ray", reason="needs rollbook[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    placed = ["cluster.policy=1", "cluster.rollout=1", "cluster.ray.policy_cpus=0.5", "cluster.ray.rollout_cpus=0.5"]
    run = SmallRun(tmp_path, [*SETTINGS, "cluster.ray.address=auto", *placed])
    yield run
    run.stop()


def placed_pids(run: SmallRun) -> dict[str, int]:
    """The last pid of each process that Ray placed, from the log."""
    rows = [json.loads(line) for line in (run.directory / "logs" / "supervisor.jsonl").read_text().splitlines()]
    return {row["process"]: row["pid"] for row in rows if row["event"] == "run.process_placed"}


def test_processes_on_ray_serve_the_run_and_are_started_again_when_they_die(run: SmallRun) -> None:
    run.start()
    both = {MemberRole.POLICY: "policy-extra-1", MemberRole.ROLLOUT: "rollout-extra-1"}
    run.until(lambda: run.step() >= 1 and members(run) == both, what="both are in service", within_s=600)
    run.until(lambda: groups_of(run, "dispatcher-rollout-extra-1"), what="the dispatcher played a group")
    killed = placed_pids(run)["policy-extra-1"]
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: placed_pids(run)["policy-extra-1"] != killed, what="it was placed again", within_s=300)
    step = run.step()
    run.until(lambda: run.step() >= step + 3, what="3 further steps")
    run.process.terminate()
    summary = run.wait()
    assert summary["exit_code"] in (0, 130), summary["stderr"]
    assert "was killed by signal 9" in summary["stderr"]
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]
