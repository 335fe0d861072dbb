"""Kill any process of a run: it recovers or resumes, no group is lost or trained twice, and the weights are the same bits."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook import audit
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState, group_id
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.run.processes.replay import compare
from rollbook.run.reader import open_run
from tests.parts.concurrency.processes import require_end
from tests.parts.run.small import CONFIG, REPOSITORY, STEPS, SmallRun, rollbook


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.stop()


def require_complete(run: SmallRun, *, steps: int = STEPS) -> None:
    """The audit passes, steps 1..N were trained once each, and a replay gives the recorded weights, bit for bit."""
    report = audit(run.directory)
    assert report.ok, report.violations
    assert report.max_lag is not None
    assert report.max_lag <= report.max_head_offpolicy_versions
    if (samples := report.samples) is not None:
        assert samples.expected == samples.stored + sum(samples.missing.values()) > 0 == samples.open
    with open_run(run.directory) as record:
        trained = [step.step for step in record.steps() if step.receipt == "acknowledged"]
        batched = [group.id for batch in record.batches(steps) for group in batch.groups]
    assert trained == list(range(1, steps + 1))
    assert len(batched) == len(set(batched))
    # In this process, which has imported torch. The chaos test replays in another.
    replayed = asyncio.run(compare(run.directory, None))
    assert (replayed["steps"], replayed["diverged_at"]) == (steps, None)


TAILS = REPOSITORY / "benchmarks" / "learning" / "tails_rollout.py"
TAILED_STEPS = 16


def tailed_run(directory: Path, policy: str) -> SmallRun:
    """A run whose episodes have long tails, with a batch policy that masks tokens."""
    (directory / TAILS.name).write_text(TAILS.read_text(encoding="utf-8"), encoding="utf-8")
    config = CONFIG.replace("delayed_number_guessing", "tails_rollout:TailedGuessing")
    config = config.replace("step_s = 0.02", "mean_s = 0.3, shape = 1.5")
    return SmallRun(directory, [f"gate.batch_policy={policy}"], config=config)


def require_masked_tokens(run: SmallRun, *, steps: int) -> None:
    overview = rollbook("inspect", str(run.directory)).stdout
    masked = rf"^masked      [0-9.]+% of \d+ tokens of the last {min(steps, 20)} steps"
    assert re.search(masked, overview, re.MULTILINE), overview


def require_parts(run: SmallRun, *, steps: int) -> None:
    with open_run(run.directory) as record:
        trained = [group for batch in record.batches(steps) for group in batch.groups]
    late = next(group for group in trained if group.part > 1)
    shown = rollbook("inspect", str(run.directory), late.id).stdout
    assert f"part {late.part}; its baseline are the rewards of the quorum" in shown
    assert all(group.baseline is not None and len(group.baseline) == 3 for group in trained)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


@pytest.mark.timeout(900)
def test_a_run_is_protected_from_a_second_one_and_resumes_after_its_supervisor_is_killed(tmp_path: Path) -> None:
    """One run with two starts: each start costs more than its steps. The chaos test drains a run and resumes it."""
    run = tailed_run(tmp_path, "parts")
    run.overrides.append("trainer.max_steps=10_000")
    run.has_dashboard = True
    try:
        run.start()
        require_refusal_of_a_second_train(run, tmp_path / "run.toml")
        run.until(lambda: run.step() >= 4, what="step 4")
        url = require_restart_of_a_killed_dashboard(run)
        kill_supervisor(run)
        shown = (tmp_path / "stderr").read_text(encoding="utf-8")
        assert f"dashboard: {url}" in shown
        assert re.search(r"first step after \d+\.\d s: \d+\.\d checks; .*\d policy \(.*\d loading the model", shown)
        steps = run.step() + 6
        with pytest.raises(RunError, match="is not decided"), open_run(run.directory) as record:
            list(record.batches(steps))

        run.has_dashboard = False
        run.overrides.append(f"trainer.max_steps={steps}")
        summary = run.start().wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, steps, "ok"), summary["stderr"]
    require_complete(run, steps=steps)
    require_masked_tokens(run, steps=steps)
    require_parts(run, steps=steps)


def require_refusal_of_a_second_train(run: SmallRun, config: Path) -> None:
    run.until(lambda: run.pid("ledger"), what="the ledger was up")
    second = rollbook("train", str(config), "--run-dir", str(run.directory), "--no-preflight")
    assert second.returncode == 2
    assert "is in use by another" in second.stderr


def require_restart_of_a_killed_dashboard(run: SmallRun) -> str:
    """The address of the dashboard."""
    run.until(lambda: run.pid("dashboard"), what="the dashboard was up")
    url = str(json.loads((run.directory / "addresses.json").read_text(encoding="utf-8"))["dashboard"])
    assert get(f"{url}/api/run")["state"] == "running"
    run.kill("dashboard")
    # The socket belongs to the supervisor: a request waits until the next process serves it.
    assert get(f"{url}/api/groups")["total"] > 0
    return url


def kill_supervisor(run: SmallRun) -> None:
    """No process of the run is left behind."""
    processes = run.descendants()
    assert len(processes) >= 5
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    require_end(processes, within_s=20)


# The chaos test kills every process several times; these name the process that does not recover.
@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "policy", "ledger", "rollout", "worker"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "role"),
    [("parts", "rollout"), ("parts", "worker"), ("parts", "ledger"), ("parts", "trainer"), ("trim", "trainer")],
)
def test_a_run_with_slow_episodes_and_masked_tokens_recovers_when_a_process_is_killed(
    tmp_path: Path, policy: str, role: str
) -> None:
    run = tailed_run(tmp_path, policy)
    run.overrides.append(f"trainer.max_steps={TAILED_STEPS}")
    try:
        run.start()
        run.until(lambda: run.step() >= 6, what="step 6")
        run.kill(role)
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, TAILED_STEPS, "ok"), summary["stderr"]
    require_complete(run, steps=TAILED_STEPS)
    require_masked_tokens(run, steps=TAILED_STEPS)
    if policy == "parts":
        require_parts(run, steps=TAILED_STEPS)


COMPARED = """
import json, zlib

def compared(cases):
    seen = json.dumps([[case.reward, case.num_sampled, case.num_turns, case.score] for case in cases])
    return [zlib.crc32(f"{number} {seen}".encode()) / 2**32 for number in range(len(cases))]
"""


@pytest.mark.slow
@pytest.mark.parametrize("role", ["rollout", "worker"])
def test_rewards_of_groups_are_those_of_the_stored_quorum_when_a_process_is_killed(tmp_path: Path, role: str) -> None:
    run = tailed_run(tmp_path, "parts")
    (tmp_path / "compared.py").write_text(COMPARED, encoding="utf-8")
    function = 'rollout.rewards.functions.compared={path = "compared:compared", group = true}'
    run.overrides += [f"trainer.max_steps={TAILED_STEPS}", function]
    try:
        run.start()
        run.until(lambda: run.step() >= 6, what="step 6")
        run.kill(role)
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, TAILED_STEPS, "ok"), summary["stderr"]
    require_complete(run, steps=TAILED_STEPS)
    with open_run(run.directory) as record:
        rows = record.groups(limit=10_000)
        stored = [group for row in rows if (group := record.samples(GroupId(row.group_id))) is not None]
        attempts = {row.group_id: row.attempt for row in rows}
        states = {row.group_id: row.state for row in rows}
    assert any(group.part > 1 and attempts[group.id] > 1 for group in stored), "the kill interrupted no late sample"
    namespace: dict[str, Any] = {}
    exec(COMPARED, namespace)
    firsts = {(group.task_id, group.draw): group for group in stored if group.part == 1}
    for group in stored:
        begun = firsts.get((group.task_id, group.draw))
        if begun is None:  # it waited too long, and its samples are not kept
            assert states[group_id(group.task_id, group.draw)] == GroupState.DROPPED
            continue
        quorum = [one for one in begun.samples if one.facts["compared"] == "with its group"]
        known = [stored_case(one, score=one.reward) for one in quorum]
        if group is begun:
            values = namespace["compared"]([stored_case(one, score=None) for one in quorum])
            assert [one.reward for one in quorum] == values
        for one in group.samples:
            if one.facts["compared"] == "with the quorum of its group":
                assert one.reward == namespace["compared"]([*known, stored_case(one, score=None)])[-1]


def stored_case(sample: RolloutSample, *, score: float | None) -> RewardCase:
    environment = sample.metrics["reward/environment"]
    return RewardCase(
        row={}, reward=environment, num_sampled=sample.num_trained, num_turns=len(sample.turns), score=score
    )
