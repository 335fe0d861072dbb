"""Whole runs with faulty rollout functions: failures are counted and explained; a run with only failures stops with the cause."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import CONFIG, SmallRun, rollbook

MISBEHAVING = '''
"""Number guessing whose rollout has one of the faults in rollout.settings, in turn, in every n-th call."""
import itertools

import number_guessing

calls = itertools.count()


def make_rollout(setup):
    play = number_guessing.make_rollout(setup)
    every, faults = setup.settings["every"], setup.settings["faults"]

    async def rollout(row):
        number, is_right = divmod(next(calls), every)
        if not is_right:
            match faults[number % len(faults)]:
                case "raises":
                    raise ValueError("the grader tripped")
                case "wrong type":
                    return {"reward": 1.0}
                case "declines":
                    return None
        row.clear()  # a rollout may change its row: each episode gets a copy
        return await play(dict(SECRET))

    return rollout


SECRET = {"secret": 3, "low": 0, "high": 7}
'''


def run_with(tmp_path: Path, *faults: str, every: int, steps: int = 4) -> SmallRun:
    run = SmallRun(
        tmp_path,
        [
            "rollout.function=misbehaving",
            f"rollout.settings.faults={json.dumps(faults)}",
            f"rollout.settings.every={every}",
            f"trainer.max_steps={steps}",
            "env.args.step_s=0.0",
        ],
        config=CONFIG,
    )
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING, encoding="utf-8")
    return run


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[SmallRun]]:
    runs: list[SmallRun] = []
    yield runs
    for run in runs:
        run.stop()


@pytest.mark.slow
def test_a_rollout_that_fails_now_and_then_is_retried_one_that_returns_none_makes_smaller_groups_and_both_are_counted(
    tmp_path: Path, running: list[SmallRun]
) -> None:
    run = run_with(tmp_path, "raises", "wrong type", "declines", every=5)
    running.append(run)
    summary = run.start().wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, 4, "ok"), summary["stderr"]
    events = [
        event
        for event in read_json_lines(run.directory / "logs" / "rollout.jsonl")
        if event["event"] == "rollout.samples_failed"
    ]
    causes = [text for event in events for text in event["causes"]]
    assert any("ValueError: the grader tripped" in text for text in causes), causes
    assert any("dict" in text for text in causes), causes
    assert sum(event["declined"] for event in events) >= 1


# The test of the dispatcher with the same rollout is in `test_rollout_dispatcher.py`.
@pytest.mark.slow
def test_a_rollout_that_always_fails_stops_the_run_with_the_cause(tmp_path: Path, running: list[SmallRun]) -> None:
    run = run_with(tmp_path, "raises", every=1)
    running.append(run)
    summary = run.start().wait()
    assert (summary["exit_code"], summary["end"], summary["steps"]) == (1, "failed", 0)
    assert "the grader tripped" in summary["stderr"]
    assert "rollout stopped the run" in summary["stderr"]
    raising = MISBEHAVING.splitlines().index('                    raise ValueError("the grader tripped")') + 1
    assert f'misbehaving.py", line {raising}, in rollout' in summary["stderr"]
    assert not (run.directory / "plots").exists()
    assert "resume " not in summary["stderr"]
    debugged = rollbook("debug", str(run.directory))
    assert debugged.returncode == 1
    assert f'misbehaving.py", line {raising}, in rollout' in debugged.stderr
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"]
    assert audit["dropped"]["invalid"] >= 5
