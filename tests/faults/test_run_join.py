"""Processes join a run, serve it and are killed: the run continues, and every group is accounted for."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from rollbook.contracts.admission import Member, MemberRole, RunId
from rollbook.dashboard.process_files import read_processes
from rollbook.ledger.client.blocking import open_sync_ledger_client
from rollbook.ledger.stores.registry import open_reader, sqlite_url
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.membership import node_name
from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import REPOSITORY, SmallRun, rollbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = ["cluster.allow_join=true", "trainer.max_steps=10_000", "env.args.step_s=0.05"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, SETTINGS).start()
    run.until(lambda: run.step() >= 1, what="step 1")
    yield run
    run.stop()


@contextmanager
def joined(run: SmallRun, role: str, *, by_address: bool = False) -> Iterator[subprocess.Popen[str]]:
    target = [str(run.directory)]
    if by_address:
        address = json.loads((run.directory / "addresses.json").read_text(encoding="utf-8"))["ledger"]
        target = [address, "--token-file", str(run.directory / "token"), "--source", str(run.directory.parent)]
    command = [sys.executable, "-m", "rollbook", "join", *target, "--role", role, "--name", f"extra-{role}"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def members(run: SmallRun) -> dict[MemberRole, str]:
    """Names of the members in service."""
    return {member.role: member.name for member in in_service(run)}


def load(run: SmallRun, role: MemberRole) -> float:
    return sum(member.load for member in in_service(run) if member.role is role)


def in_service(run: SmallRun) -> list[Member]:
    addresses = json.loads((run.directory / "addresses.json").read_text())
    with open_sync_ledger_client(addresses["ledger"], "small", request_s=10) as ledger:
        return [member for member in ledger.wait(ledger.client.members()) if member.in_service]


def groups_of(run: SmallRun, dispatcher: str) -> list[str]:
    """Groups that were submitted by this dispatcher."""
    with open_reader(sqlite_url(run.directory / "ledger")) as reader:
        found = reader.read_now(lambda tx: tx.groups.page(RunId("small"), limit=10_000))
        return [group.group_id for group in found if (group.owner or "").startswith(dispatcher)]


def served(run: SmallRun, name: str) -> int:
    """Spans of a policy server: it writes them when it generates."""
    file = run.directory / "spans" / f"{name}.jsonl"
    return file.read_text(encoding="utf-8").count("\n") if file.exists() else 0


def require_telemetry(run: SmallRun) -> None:
    """What the processes wrote on their own machine is in the run directory, and the views of the run show them."""
    for name in ("extra-policy", "extra-rollout"):
        local = RunDirectory(run.directory).on_this_machine(name).log_file(name)
        assert local.parent != run.directory / "logs"
        started = local.read_bytes().splitlines()[0]
        run.until(partial(_has_line, run, name, started), what=f"the log of {name} arrived")
    metrics = run.directory / "metrics-extra-rollout.jsonl"
    run.until(lambda: "rollout/groups_finished" in (read_json_lines(metrics) or [{}])[-1], what="its metrics arrived")
    listed = {process.name: (process.node, process.alive) for process in read_processes(run.directory)}
    assert listed["extra-policy"] == listed["extra-rollout"] == (node_name(), True)


def _has_line(run: SmallRun, name: str, line: bytes) -> bool:
    file = run.directory / "logs" / f"{name}.jsonl"
    return file.exists() and line in file.read_bytes()


def test_a_policy_server_and_a_dispatcher_join_serve_and_are_killed(run: SmallRun) -> None:
    with joined(run, "policy", by_address=True) as policy, joined(run, "rollout") as rollout:
        run.until(lambda: members(run).keys() >= {MemberRole.POLICY, MemberRole.ROLLOUT}, what="both are in service")
        run.until(lambda: groups_of(run, "dispatcher-extra-rollout"), what="the dispatcher played a group")
        run.until(lambda: served(run, "extra-policy"), what="the policy server generated tokens")
        require_telemetry(run)
        for process in (policy, rollout):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        step = run.step()
        run.until(lambda: run.step() >= step + 5, what="5 further steps")
        run.until(lambda: members(run) == {}, what="the leases of both expired")
    run.process.terminate()
    assert run.wait()["exit_code"] in (0, 130)
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]
    assert audit["max_lag"] <= audit["max_head_offpolicy_versions"]


@pytest.mark.parametrize("by_address", [False, True])
def test_a_process_leaves_when_the_run_stops_and_a_run_that_is_not_running_cannot_be_joined(
    run: SmallRun, by_address: bool
) -> None:
    with joined(run, "rollout", by_address=by_address) as rollout:
        run.until(lambda: MemberRole.ROLLOUT in members(run), what="the dispatcher joined")
        run.process.terminate()
        run.wait()
        _, said = rollout.communicate(timeout=60)
        assert rollout.returncode == 0
        assert "the run has" in said
    refused = rollbook("join", str(run.directory), "--role", "policy")
    assert refused.returncode == 2
    assert "is not running: start it with `rollbook train`" in refused.stderr


def test_a_run_is_scaled_up_and_down_while_it_runs(run: SmallRun) -> None:
    asked = rollbook("scale", str(run.directory), "policy=1", "rollout=1", "--json")
    assert json.loads(asked.stdout) == {"policy": 1, "rollout": 1, "env": 0}, asked.stderr
    run.until(
        lambda: members(run) == {MemberRole.POLICY: "policy-extra-1", MemberRole.ROLLOUT: "rollout-extra-1"},
        what="both are in service",
    )
    run.until(lambda: groups_of(run, "dispatcher-rollout-extra-1"), what="the dispatcher played a group")
    run.kill("policy-extra-1")
    run.until(lambda: run.pid("policy-extra-1"), what="the policy server was started again")
    assert rollbook("scale", str(run.directory), "policy=0", "rollout=0").returncode == 0
    run.until(lambda: members(run) == {}, what="both have left")
    refused = rollbook("scale", str(run.directory), "trainer=2")
    assert refused.returncode == 2
    assert "must look like policy=3, rollout=2 or env=1" in refused.stderr
    run.process.terminate()
    assert run.wait()["exit_code"] in (0, 130)
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]


def test_an_environment_server_joins_and_leaves_when_its_episodes_have_ended(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [*SETTINGS, "env.pool_size=32"]).start()
    try:
        run.until(lambda: run.step() >= 1, what="step 1")
        with joined(run, "env", by_address=True) as env:
            run.until(lambda: members(run).get(MemberRole.ENV) == "extra-env", what="it is in service")
            run.until(lambda: load(run, MemberRole.ENV) > 0, what="episodes use it")
            env.send_signal(signal.SIGINT)
            _, said = env.communicate(timeout=240)
            assert env.returncode == 0
            assert "left the run" in said
        step = run.step()
        run.until(lambda: run.step() >= step + 3, what="3 further steps")
        run.process.terminate()
        assert run.wait()["exit_code"] in (0, 130)
    finally:
        run.stop()
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]
