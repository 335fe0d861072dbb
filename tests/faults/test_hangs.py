"""Hangs of every part: each is detected within its deadline and reported, and the run continues or stops with the cause.

`test_rollout_rewards.py` covers reward functions in an endless loop.
"""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.ledger.client.client import open_ledger_client
from rollbook.rollout.dispatch.failure_breaker import RolloutsFailingError
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.child_main import exit_code_of
from rollbook.run.supervision.exits import EXIT_CRASHED, EXIT_STOP_RUN
from rollbook.telemetry.events import EventLog, read_json_lines
from tests.parts.concurrency.processes import descendants_running
from tests.parts.concurrency.until import until
from tests.parts.inference.engines import TinyModel
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.sink import LedgerSink, open_sink
from tests.parts.run.small import SmallRun
from tests.parts.trainer.batches import quick
from tests.parts.trainer.ledger import TinyLoop, open_trainer_ledger

STEPS = 12
"""More than the groups that are ready when a process stops at step 4 suffice for."""
QUIET = EventLog("test", echo=io.StringIO())


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[LedgerSink]:
    async with open_sink(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """A server that accepts connections and never responds, like a hung process. Yields its url."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while await reader.read(65_536):
            pass

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)


def exit_code_after(error: BaseException) -> int:
    """The exit code of a supervised process that ends with this error."""
    return exit_code_of(error, Channel(None), QUIET)


async def test_a_rollout_that_never_returns_is_cancelled_and_its_group_dropped_with_its_stack(
    tmp_path: Path, sink: LedgerSink
) -> None:
    play = dispatching(tmp_path, [{"action": "hang"}, {}, {}], max_seconds=2.0, grace_s=0.1, sink=sink)
    await play.run()
    dropped = sink.rows[GroupId("t0@0")]
    assert dropped.drop_reason is not None
    assert "4 x rollout did not end within 2 s (max_seconds) and was cancelled in" in dropped.drop_reason
    assert "rollout (functions.py:" in dropped.drop_reason
    assert [sink.rows[GroupId(f"t{i}@0")].state for i in (1, 2)] == ["queued", "queued"]


async def test_an_engine_that_never_responds_stops_the_run_with_its_address(tmp_path: Path, sink: LedgerSink) -> None:
    async with silent_server() as url:
        worker = {"policy_url": url, "request_s": 0.3}
        play = dispatching(tmp_path, [{}] * 8, worker=worker, max_seconds=0.3, sink=sink)
        with pytest.raises(RolloutsFailingError, match="5 groups in a row failed") as stopped:
            await play.run()
    assert f"policy request to {url} was not completed within 0.3 s" in str(stopped.value)
    assert exit_code_after(stopped.value) == EXIT_STOP_RUN


async def test_an_environment_that_stops_in_mid_step_is_named_and_survived(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{"hangs_at": 1}, {}, {}], step_s=2.0, sink=sink)
    await play.run()
    dropped = sink.rows[GroupId("t0@0")]
    assert "step 1 of the environment GuessingEnvironment did not return within 2 s (rollout.step_s)" in str(
        dropped.drop_reason
    )
    assert sink.rows[GroupId("t1@0")].state == "queued"


async def test_a_sandbox_that_never_becomes_ready_stops_the_run_with_the_exceeded_limit(
    tmp_path: Path, sink: LedgerSink
) -> None:
    play = dispatching(tmp_path, [{}] * 8, worker={"sandbox": "never_ready"}, open_s=0.3, sink=sink)
    with pytest.raises(RolloutsFailingError, match=r"no environment was ready within 0.3 s \(rollout.open_s\)"):
        await play.run()


async def test_a_request_to_a_full_queue_fails_with_the_cause_after_its_budget_and_is_served_once_the_queue_is_free(
    tmp_path: Path,
) -> None:
    config = InferenceConfig(
        engine="scripted", max_running=1, max_queued=1, scripted=ScriptedConfig(token_s=0.05, max_model_len=4096)
    )
    async with open_engine(config, None) as engine, serve(build_app(engine, config)) as url:
        await engine.load_weights(*TinyModel(root=tmp_path).weights(1))
        async with open_policy_client(url, request_s=30.0) as client:
            long = SamplingParams(max_tokens=2000)
            stuck = [asyncio.create_task(client.complete([1], long)) for _ in range(2)]
            await until(lambda: (engine.stats().running, engine.stats().queued) == (1, 1))
            with pytest.raises(TransientError, match=r"returned 503 \(queue_full\)"):
                await client.complete([1], long, timeout_s=1.0)
            waiting = asyncio.create_task(client.complete([1], SamplingParams(max_tokens=1)))
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            assert len((await waiting).token_ids) == 1


async def test_a_ledger_that_never_responds_ends_the_dispatcher_with_the_exit_code_for_a_restart(
    tmp_path: Path,
) -> None:
    async with (
        silent_server() as url,
        open_ledger_client(url, RunId("r"), request_s=0.5, log=QUIET) as ledger,
    ):
        play = dispatching(tmp_path, [{}], sink=ledger)
        with pytest.raises(TransientError, match=f"ledger at {url}: no response to POST /v1/runs/r/join") as ended:
            await play.run()
    assert exit_code_after(ended.value) == EXIT_CRASHED


async def test_a_stopped_worker_is_reported_and_replaced_and_its_groups_are_played_again(
    tmp_path: Path, sink: LedgerSink
) -> None:
    marker = tmp_path / "hangs"
    rows = [{"action": "hang_once", "marker": str(marker)}, {}]
    play = dispatching(tmp_path, rows, worker_silence_s=2.0, worker_stop_s=0.2, sink=sink)
    running = asyncio.create_task(play.run())
    await sink.until(lambda: any(row.state == "queued" for row in sink.rows.values()))
    await until(marker.exists)
    (worker,) = descendants_running("rollbook.rollout.workers.main")
    worker.suspend()
    await running
    assert {row.state for row in sink.rows.values()} == {"queued"}
    (stalled,) = play.events("rollout.worker_stalled")
    assert (stalled["pid"], stalled["age_s"], stalled["in_flight"]) == (worker.pid, 2.0, 1)
    assert "stopped by a signal" in stalled["stack"]
    assert not worker.is_running()


async def test_the_stack_of_a_worker_that_blocks_its_event_loop_is_reported_before_it_is_replaced(
    tmp_path: Path,
    sink: LedgerSink,
) -> None:
    sink.limit(capacity=8, max_attempts=1)
    play = dispatching(tmp_path, [{"action": "block"}], sink=sink, worker_silence_s=2.0, worker_stop_s=0.2)
    await play.run()
    (stalled,) = play.events("rollout.worker_stalled")
    assert "parts/rollout/functions.py" in stalled["stack"], "the line that blocks"
    assert "sent no heartbeat for 2 s" in sink.released[0][2]


async def test_a_weight_push_without_a_response_ends_the_trainer_with_the_address(tmp_path: Path) -> None:
    async with (
        silent_server() as url,
        WeightTransferClient([url], request_s=0.3) as replicas,
        open_trainer_ledger() as ledger,
    ):
        await ledger.create(max_steps=1)
        loop = TinyLoop(ledger.source(), replicas, tmp_path, quick(publish_timeout_s=0.5))
        with pytest.raises(TransientError, match=f"publication 0 at {url} did not finish") as ended:
            await loop.run()
    assert exit_code_after(ended.value) == EXIT_CRASHED


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    overrides = [
        "run.silence_s=10.0",
        "run.most_quick_deaths=50",
        f"trainer.max_steps={STEPS}",
        "rollout.worker_silence_s=30.0",
    ]
    run = SmallRun(tmp_path, overrides)
    yield run
    run.stop()


def report_of_stopped_process(run: SmallRun, role: str) -> dict[str, Any]:
    """SIGSTOP a process in the middle of a run; returns the event that reports it."""
    run.start()
    run.until(lambda: run.step() >= 4, what="step 4")
    pid = run.until(lambda: run.pid(role), what=f"{role} was up")
    os.kill(pid, signal.SIGSTOP)
    summary = run.wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    assert not psutil.pid_exists(pid)
    silent = [
        e for e in read_json_lines(run.directory / "logs" / "supervisor.jsonl") if e["event"] == "run.process_silent"
    ]
    (report,) = [event for event in silent if event["pid"] == pid]
    assert report["process"] == role
    return report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_policy_server_is_reported_and_replaced_and_the_run_continues(run: SmallRun) -> None:
    assert "stopped by a signal" in report_of_stopped_process(run, "policy")["stack"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["ledger", "trainer", "rollout"])
def test_any_stopped_process_is_reported_and_replaced_and_the_run_continues(run: SmallRun, role: str) -> None:
    report_of_stopped_process(run, role)


@pytest.mark.slow
def test_a_run_whose_engine_never_responds_stops_with_exit_code_1_and_the_cause(tmp_path: Path) -> None:
    overrides = [
        "inference.engine=scripted",
        "inference.scripted.token_s=3600.0",
        "inference.request_s=2.0",
        "rollout.max_seconds=2.0",
        "rollout.retry_budget=0",
    ]
    run = SmallRun(tmp_path, overrides)
    try:
        summary = run.start().wait()
        assert (summary["exit_code"], summary["end"]) == (1, "failed")
        assert "was not completed within 2 s" in summary["stderr"]
    finally:
        run.stop()
