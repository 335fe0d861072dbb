"""A whole run with several policy servers: all of them get every version, also one that was killed and restarted."""

import json
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import SmallRun


def events(run: SmallRun, process: str, name: str) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run.directory / "logs" / f"{process}.jsonl") if row.get("event") == name]


def steer(url: str, body: dict[str, Any]) -> int:
    """The status of a request without the run's token."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer another-token-0000"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()
    return refused.value.code


def assert_only_the_token_steers(run: SmallRun) -> None:
    ledger = events(run, "ledger", "ledger.serving")[-1]["url"]
    policy = events(run, "policy", "policy.serving")[-1]["url"]
    for path, body in (
        (f"{ledger}/v1/runs/small/take_role", {"restored_step": 0}),
        (f"{ledger}/v1/runs/small/finish", {"reason": "max_steps", "epoch": 10}),
        (f"{policy}/pause", {}),
        (f"{policy}/drain", {}),
        (f"{policy}/init_weight_transfer_engine", {"init_info": {"backend": "nccl", "master_address": "10.0.0.1"}}),
    ):
        assert steer(path, body) == 401, path
    token = (run.directory / "token").read_text(encoding="ascii").strip()
    for process in run.descendants():
        with suppress(psutil.NoSuchProcess):
            assert token not in str(process.cmdline()), "arguments are visible to all users"
            assert token not in str(process.environ())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_two_replicas_survives_the_death_of_one(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ["inference.replicas=2", "trainer.max_steps=10", "inference.confirm_s=20.0"]).start()
    try:
        run.until(lambda: run.step() >= 3, what="three steps")
        assert_only_the_token_steers(run)
        run.kill("policy-1")
        summary = run.wait()
    finally:
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert (summary["steps"], summary["audit"]) == (10, "ok")
    token = (run.directory / "token").read_bytes().strip()
    assert [path for path in run.directory.rglob("*.*") if path.is_file() and token in path.read_bytes()] == []
    published = events(run, "trainer", "policy.weights_published")
    assert {row["replicas"] for row in published} >= {2}
    config = (run.directory / "config.toml").read_text()
    assert "replicas = 2" in config
    assert json.loads((run.directory / "processes.json").read_text())["processes"]["policy-1"]["restarts"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("override", ['inference.transfer="pull"', 'inference.transfer="directory"'])
@pytest.mark.parametrize("sequence", ["in_flight", "paused"])
def test_every_weight_transport_trains_a_run_to_its_end(tmp_path: Path, override: str, sequence: str) -> None:
    settings = [override, f'inference.update_sequence="{sequence}"', "inference.replicas=2", "trainer.max_steps=5"]
    run = SmallRun(tmp_path, settings).start()
    try:
        summary = run.wait(timeout_s=800)
    finally:
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert events(run, "trainer", "policy.weights_published")[-1]["replicas"] == 2
