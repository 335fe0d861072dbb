"""`rollbook study` with real runs: it trains the cells, survives a kill, and compares them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.parts.run.small import CONFIG, EXAMPLE, REPOSITORY, rollbook

STUDY = """
[study]
config = "run.toml"
seeds = [3]
measure = "reward"
[settings]
trainer.max_steps = 3
[grid]
gate.max_head_offpolicy_versions = [0, 1]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    for module in EXAMPLE.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def arguments(home: Path) -> list[str]:
    return ["study", str(home / "study.toml"), "--out", str(home / "out"), "--jobs", "2", "--json"]


@pytest.mark.slow
def test_a_study_trains_its_cells_once_and_refuses_to_mix_settings(home: Path) -> None:
    only = ("--only", "*=1")
    done = rollbook(*arguments(home), *only)
    assert done.returncode == 0, done.stderr
    row, report = map(json.loads, done.stdout.splitlines())
    assert (row["cell"], row["seed"], row["end"]) == ("max_head_offpolicy_versions=1", 3, "finished")
    assert (row["steps"], row["audit"]) == (3, "ok")
    assert report["samples"] == 3 * 4 * 4
    assert report["unfinished"] == [{"cell": "max_head_offpolicy_versions=0", "seed": 3, "end": "missing"}]
    text = (home / "out" / "report" / "report.md").read_text(encoding="utf-8")
    assert "| max_head_offpolicy_versions=1 | 1 |" in text
    assert "Not started: 1 of 2 runs." in text
    assert (home / "out" / "report" / "curves.svg").stat().st_size > 10_000

    again = rollbook(*arguments(home), *only)
    assert (again.returncode, len(again.stdout.splitlines())) == (0, 1), again.stderr
    changed = rollbook(*arguments(home), *only, "--set", "trainer.lr=0.5")
    assert changed.returncode == 1
    assert "was trained with other settings" in changed.stderr


def test_a_dry_run_lists_once_what_all_cells_share_and_trains_nothing(home: Path) -> None:
    listed = rollbook("study", str(home / "study.toml"), "--out", str(home / "out"), "--dry-run")
    bound = "gate.max_head_offpolicy_versions"
    assert listed.stdout.splitlines() == [
        "all cells  trainer.max_steps=3 run.seed=3",
        f"max_head_offpolicy_versions=0 seed 3  {bound}=0",
        f"max_head_offpolicy_versions=1 seed 3  {bound}=1",
    ], listed.stderr
    assert not (home / "out").exists()
    one = rollbook("study", str(home / "study.toml"), "--dry-run", "--json", "--only", "*=1")
    assert [json.loads(line)["cell"] for line in one.stdout.splitlines()] == ["max_head_offpolicy_versions=1"]


def test_a_study_that_is_stopped_while_a_cell_starts_does_not_train_the_cell(home: Path) -> None:
    stopped = rollbook(*arguments(home), "--only", "*=1", "--minutes", "0")
    row, _ = map(json.loads, stopped.stdout.splitlines())
    assert (stopped.returncode, row["end"]) == (130, "interrupted"), stopped.stderr


@pytest.mark.slow
def test_a_killed_study_ends_its_runs_and_the_same_command_finishes_it(home: Path) -> None:
    command = [sys.executable, "-m", "rollbook", *arguments(home)]
    with (home / "killed.log").open("w") as log:
        killed = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    runs = [home / "out" / "cells" / f"max_head_offpolicy_versions={bound}" / "seed-3" for bound in (0, 1)]
    until = time.monotonic() + 240
    while not all((run / "run.json").exists() for run in runs):
        assert killed.poll() is None, (home / "killed.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
    children = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    psutil.wait_procs(children, timeout=120)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    done = rollbook(*arguments(home))
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stderr
    *cells, report = map(json.loads, done.stdout.splitlines())
    assert {(row["end"], row["steps"], row["audit"]) for row in cells} == {("finished", 3, "ok")}
    assert [cell["seeds"] for cell in report["cells"]] == [[3], [3]]
