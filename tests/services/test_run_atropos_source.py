"""The trainer trains groups posted by Atropos environments: by a client that imitates atroposlib, and by atroposlib itself."""

import asyncio
import gzip
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import EndOfRun, TrainingBatch
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupState
from rollbook.ledger.atropos.feed import AtroposFeed
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.reader import open_run
from rollbook.tasks.config import AtroposSourceConfig
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.atropos import dialect, scored
from tests.parts.ledger.groups import settings
from tests.parts.run.small import SmallRun

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "05_existing_atropos_env"
PYTHON = ROOT / ".venvs" / "atropos" / "bin" / "python"
STEPS = 4


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def send(url: str, body: Any = None, *, method: str = "POST", is_compressed: bool = False) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if is_compressed and raw is not None:
        raw, headers["Content-Encoding"] = gzip.compress(raw, 9), "gzip"
    request = urllib.request.Request(url, data=raw, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def post_like_atroposlib(url: str, stopping: threading.Event, posted: list[Any]) -> None:
    """Send the requests of a `BaseEnv` in its order: wait for the trainer, register, watch the queue, post compressed groups."""
    env_id: int | None = None
    number = 0
    while not stopping.is_set():
        try:
            if env_id is None:
                settings = {"max_token_length": 64, "desired_name": "plain", "weight": 1.0, "group_size": 4}
                response = send(f"{url}/register-env", {**settings, "min_batch_allocation": None})
                env_id = response.get("env_id")
                time.sleep(0.1)
                continue
            status = send(f"{url}/status-env", {"env_id": env_id}, method="GET")
            if status["queue_size"] > 8:
                time.sleep(0.05)
                continue
            digit, number = number % 8, number + 1
            answers = [9, 10, 9, 10]
            group = {
                "tokens": [[0, 1 + digit, answer] for answer in answers],
                "masks": [[-100, -100, answer] for answer in answers],
                "scores": [float((answer == 9) == (digit % 2 == 0)) for answer in answers],
                "inference_logprobs": [[1.0, 1.0, -0.7] for _ in answers],
                "messages": None,
                "env_id": env_id,
            }
            send(f"{url}/scored_data", group, is_compressed=True)
            posted.append(group)
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)


def atropos_run(tmp_path: Path, port: int, *more: str) -> SmallRun:
    config = (EXAMPLE / "run.toml").read_text(encoding="utf-8")
    overrides = [f"tasks.atropos.port={port}", f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=2", *more]
    return SmallRun(tmp_path, overrides, config=config)


def assert_trained_from_posts(run_dir: Path) -> None:
    with open_run(run_dir) as run:
        report = run.audit()
        groups = run.groups(limit=1000)
    assert report.ok, report.violations
    durable = [group for group in groups if group.state == GroupState.DURABLE]
    assert len(durable) == STEPS * 4
    assert {str(group.origin) for group in groups} == {"external"}
    assert {group.task_id for group in groups} == {"atropos.env0"}


@contextmanager
def posting(url: str) -> Iterator[list[Any]]:
    stopping, posted = threading.Event(), list[Any]()
    thread = threading.Thread(target=post_like_atroposlib, args=(url, stopping, posted))
    thread.start()
    try:
        yield posted
    finally:
        stopping.set()
        thread.join(60)


def test_the_trainer_trains_groups_posted_by_an_atropos_environment(tmp_path: Path) -> None:
    port = free_port()
    with posting(f"http://127.0.0.1:{port}") as posted:
        summary = atropos_run(tmp_path, port, "trainer.missing_logprobs=refuse").start().wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert summary["steps"] == STEPS
    assert len(posted) >= STEPS * 4
    assert_trained_from_posts(tmp_path / "run")


async def test_the_lag_of_a_posted_group_is_judged_by_its_policy_version(tmp_path: Path) -> None:
    log, rule = EventLog("feed"), settings(per_step=1, policy=BatchPolicy.DROP, staleness_bound=0)
    async with (
        asyncio.timeout(60),
        dialect(tmp_path) as server,
        open_ledger_client(server.url, RunId("trained"), request_s=20.0, log=log) as trainer,
    ):

        async def train(step: int) -> int:
            """Train the batch of this step and publish; the group in the batch."""
            batch = await trainer.batch(step, wait_s=30.0)
            assert isinstance(batch, TrainingBatch)
            await trainer.acknowledge(step, f"w{step}")
            await trainer.confirm(await trainer.register(step, f"w{step}"))
            return int(batch.groups[0].samples[0].sequences[0].token_ids[0])

        await trainer.create_run(rule)
        await trainer.take_role(restored_step=0)
        await trainer.confirm(await trainer.register(0, "w0"))
        feed = AtroposFeed(
            trainer,
            url=server.url,
            batch_sequences=2,
            max_token_len=AtroposSourceConfig().max_token_len,
            max_queued=9,
            num_steps=None,
            log=log,
        )
        feeding = asyncio.create_task(feed.run())
        await server.post("/scored_data", scored(10, policy_version=0))
        assert await train(1) == 10
        for name, version in (
            (20, {"policy_version": 0}),
            (30, {"policy_version": 99}),
            (40, {"policy_version": 1}),
            (50, {}),
        ):
            await server.post("/scored_data", scored(name, **version))
        assert [await train(2), await train(3)] == [40, 50]
        await trainer.finish(EndOfRun.STOPPED)
        await feeding
        dropped = [group.drop_reason for group in await trainer.groups() if group.state == "dropped"]
        assert dropped == ["stale: its oldest version is 0, batch 2 takes 1 and newer"]
        assert (await trainer.audit()).ok


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_kill_no_posted_group_is_trained_twice(tmp_path: Path) -> None:
    port = free_port()
    with posting(f"http://127.0.0.1:{port}"):
        first = atropos_run(tmp_path, port).start()
        try:
            first.until(lambda: first.step() >= 2, what="two steps")
            first.kill("supervisor")
            first.process.communicate(timeout=60)
        finally:
            first.stop()
        summary = atropos_run(tmp_path, port).start().wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert_trained_from_posts(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="make test-atropos installs atroposlib")
def test_an_unmodified_atropos_environment_is_a_source_of_groups(tmp_path: Path) -> None:
    port = free_port()
    run = atropos_run(tmp_path, port).start()
    run.until((run.directory / "model" / "tokenizer.json").exists, what="the tokenizer")
    command = [str(PYTHON), str(EXAMPLE / "echo_env.py"), f"http://127.0.0.1:{port}", str(run.directory / "model")]
    env = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    try:
        summary = run.wait()
    finally:
        env.kill()
        env.wait()
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert_trained_from_posts(tmp_path / "run")
