"""A part that keeps failing: the console says why within seconds, and the run ends with advice instead of waiting."""

import socket
from pathlib import Path

import pytest

from tests.parts.run.small import CONFIG, SmallRun

pytestmark = pytest.mark.slow

SAYS_S = 60.0
"""Until the console must show the cause, on a busy machine."""


def stderr(run: SmallRun) -> str:
    return (run.outputs / "stderr").read_text(encoding="utf-8")


def test_a_policy_server_that_fails_at_every_update_ends_the_run_with_its_exception(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.plant(
        """
from rollbook.inference.server.weight_updates import WeightUpdates

async def apply(self, info):
    raise RuntimeError("planted: cannot allocate 61 GiB")

WeightUpdates.apply = apply
""",
    )
    run.start()
    try:
        run.until(
            lambda: "trainer waits for the policy servers to load weights" in stderr(run),
            what="the console named the failing update",
            within_s=SAYS_S,
        )
        run.until(
            lambda: any("step 0/" in line and "61 GiB" in line for line in stderr(run).splitlines()),
            what="the status line named the exception",
            within_s=SAYS_S,
        )
        summary = run.wait()
    finally:
        run.stop()
    assert summary["end"] == "failed"
    assert "RuntimeError: planted: cannot allocate 61 GiB" in summary["stderr"]
    assert "lower inference.max_running" in summary["stderr"], "the setting that helps"
    assert any(
        "for the policy servers to load weights" in problem and "61 GiB" in problem for problem in summary["problems"]
    )
    assert "61 GiB" in (run.directory / "logs" / "trainer.jsonl").read_text(encoding="utf-8")
    assert summary["restarts"] == 0, "the trainer was not restarted to wait again"


def test_an_environment_server_that_refuses_connections_ends_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = CONFIG.replace('name = "delayed_number_guessing"', f'url = "http://127.0.0.1:{port}"').replace(
        "args = { max_turns = 4, step_s = 0.02 }\n", ""
    )
    run = SmallRun(tmp_path, config=config).start()
    try:
        run.until(
            lambda: f"rollout waits for the environment server at http://127.0.0.1:{port}" in stderr(run),
            what="the console named the server",
            within_s=SAYS_S,
        )
        summary = run.wait()
    finally:
        run.stop()
    assert summary["end"] == "failed"
    assert "no rollout worker could be started" in summary["stderr"]
    assert "Start the server, or correct env.url" in summary["stderr"]


def test_a_module_that_hangs_at_import_ends_the_run_with_its_line(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ["rollout.worker_start_s=25"])
    module = tmp_path / "number_guessing.py"
    module.write_text(
        f"import sys, time\nif 'workers' in sys.argv[0]:\n    time.sleep(3600)\n{module.read_text(encoding='utf-8')}",
        encoding="utf-8",
    )
    run.start()
    try:
        run.until(
            lambda: "rollout waits for a rollout worker to start" in stderr(run),
            what="the console named the start",
            within_s=SAYS_S,
        )
        assert 'number_guessing.py", line 3' in stderr(run)
        summary = run.wait()
    finally:
        run.stop()
    assert summary["end"] == "failed"
    assert "within 25 s (rollout.worker_start_s)" in summary["stderr"]


def test_a_process_that_hangs_while_it_starts_is_named_with_its_line(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ["run.ready_s=30"])
    module = tmp_path / "number_guessing.py"
    module.write_text(f"import time\ntime.sleep(3600)\n{module.read_text(encoding='utf-8')}", encoding="utf-8")
    run.start()
    try:
        summary = run.wait()
    finally:
        run.stop()
    assert "rollout waits for the end of its start: loading the tasks" in summary["stderr"]
    assert 'number_guessing.py", line 2' in summary["stderr"]
    assert summary["end"] == "failed"


def test_a_ledger_that_does_not_respond_is_named_and_ends_the_run(tmp_path: Path) -> None:
    """It accepts connections and answers 503: each process waits `ledger.request_s`, which is longer than `waits.REPORT_S`, is
    restarted, and is given up."""
    run = SmallRun(tmp_path, ["ledger.request_s=8", "run.most_quick_deaths=2"])
    run.plant(
        """
from rollbook.ledger.service import Ledger
from rollbook.contracts.errors import TransientError

async def join(self, *args, **kwargs):
    raise TransientError("planted: the store does not respond")

Ledger.join = join
""",
    )
    run.start()
    try:
        summary = run.wait()
    finally:
        run.stop()
    assert summary["end"] == "failed"
    assert "planted: the store does not respond" in summary["stderr"]
    assert "rollout waits for the ledger to respond" in summary["stderr"]
    assert "it died 3 times in a row" in summary["stderr"]
