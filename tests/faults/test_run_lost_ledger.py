"""A run whose ledger lost commits: `audit` names it, `ledger rebuild` restores it, and `replay --verify` gives the same bits."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from rollbook.run.reader import open_run
from tests.parts.run.small import SmallRun, rollbook

STEPS = 9
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def audited(run: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(rollbook("audit", str(run), "--full", "--json").stdout)
    return report


def require_rebuilt(run: Path) -> None:
    done = rollbook("ledger", "rebuild", "--store", str(run))
    assert done.returncode == 0, done.stderr
    report = audited(run)
    assert report["violations"] == []


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def digests(run: Path) -> list[str]:
    with open_run(run) as recorded:
        return [step.digest for step in recorded.steps()]


def test_a_run_survives_a_damaged_log_and_a_lost_database(tmp_path: Path) -> None:
    settings = [f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=3"]
    run = SmallRun(tmp_path, settings).start()
    run.until(lambda: run.step() >= 5, what="step 5")
    os.kill(run.process.pid, signal.SIGSTOP)  # it must not restart the ledger
    run.kill("ledger")
    run.stop()
    trained, before = len(digests(run.directory)), audited(run.directory)
    assert (before["violations"], before["steps"]) == ([], trained)

    flip_a_bit(run.directory / "ledger" / "ledger.sqlite-wal")
    found = audited(run.directory)["violations"]
    assert any("the ledger has lost commits" in sentence for sentence in found), found
    refused = run.start().wait()
    assert "rollbook ledger rebuild" in refused["stderr"]
    require_rebuilt(run.directory)
    assert len(digests(run.directory)) == trained
    summary = run.start().wait()
    assert (summary["exit_code"], summary["steps"]) == (0, STEPS), summary["stderr"][-3000:]

    weights, law = digests(run.directory), audited(run.directory)["law"]
    for damage in ("delete", "truncate"):
        database = run.directory / "ledger" / "ledger.sqlite"
        if damage == "delete":
            database.unlink()
        else:
            database.write_bytes(database.read_bytes()[:5000])
        found = audited(run.directory)["violations"]
        assert any("the ledger is behind its run: it ends at step 0" in sentence for sentence in found), found
        require_rebuilt(run.directory)
        assert (digests(run.directory), audited(run.directory)["law"]) == (weights, law)
    # Continued with other settings, it is replayed by period.
    run.overrides = [f"trainer.max_steps={STEPS + 2}", "trainer.checkpoint_every=3", "trainer.lr=0.003"]
    assert run.start().wait()["exit_code"] == 0
    verified = rollbook("replay", str(run.directory), "--verify")
    assert verified.returncode == 0, verified.stderr
    assert f"after step {STEPS} the run continued with other settings: trainer.lr 0.001 → 0.003" in verified.stderr
    assert f"{STEPS + 2} steps reproduced bit for bit" in verified.stderr
    # It is evaluated with the modules that it was trained with.
    (tmp_path / "number_guessing.py").write_text("raise RuntimeError('not the code of this run')\n", encoding="utf-8")
    evaluated = rollbook("eval", str(run.directory))
    assert evaluated.returncode == 0, evaluated.stderr
    assert "number_guessing.py changed since the run was trained" in evaluated.stderr
    shutil.rmtree(run.directory)
