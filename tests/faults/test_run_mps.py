"""Trainer and policy server are clients of an MPS server (a stand-in, on a CPU): whatever is killed, the bits stay the same, and
nothing is left over."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollbook.run.directory import RunDirectory
from rollbook.run.resources.mps import PID_FILE, kill_programs, mps_directory
from tests.parts.run.mps_stand_in import install
from tests.parts.run.small import SmallRun, rollbook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is of Linux")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, ["resources.mps=true", "run.most_quick_deaths=50", "trainer.max_steps=100000"])
    run.module = "tests.parts.run.with_mps"
    run.environment |= install(tmp_path / "bin")
    yield run
    run.stop()
    assert kill_programs(mps_directory(RunDirectory(run.directory))) == [], "nothing is left over"


def control(run: SmallRun) -> psutil.Process:
    place = mps_directory(RunDirectory(run.directory))
    return psutil.Process(int((place / PID_FILE).read_text(encoding="ascii")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_of_the_server_its_clients_and_the_supervisor_change_no_bit_and_leave_nothing(run: SmallRun) -> None:
    run.start()
    clients = ("trainer", "policy")
    for role in (*clients, "server"):
        step = run.step()
        run.until(lambda step=step: run.step() > step, what="a step")  # type: ignore[misc]
        before = {name: run.pid(name) for name in ("mps", *clients)}
        if role == "server":
            (victim,) = control(run).children()
            os.kill(victim.pid, signal.SIGKILL)
        else:
            run.kill(role)
        ended = before if role == "server" else {role: before[role]}
        run.until(lambda ended=ended: all(run.pid(name) not in (None, pid) for name, pid in ended.items()), what=role)  # type: ignore[misc]
        assert {name: run.pid(name) for name in before if name not in ended} == {
            name: pid for name, pid in before.items() if name not in ended
        }
    programs = [control(run), *control(run).children()]
    run.stop()
    assert [one for one in programs if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    run.start()
    step = run.step()
    run.until(lambda: run.step() > step, what="a step")
    run.process.send_signal(signal.SIGINT)
    drained = run.wait()
    assert (drained["exit_code"], drained["end"], drained["audit"]) == (0, "drained", "ok"), drained["stderr"]
    replayed = rollbook("replay", str(run.directory), "--verify", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["steps"] >= 4
