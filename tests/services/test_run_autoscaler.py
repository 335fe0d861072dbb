"""The autoscaler observes a real ledger and a real policy server, and changes the requested numbers."""

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from rollbook.contracts.policy import SamplingParams
from rollbook.inference.server.app import build_app, serve
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.config.cluster import AutoscaleConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.autoscaler import Autoscaler, RunObserver
from rollbook.run.supervision.scale import Scale
from rollbook.telemetry.events import EventLog
from tests.parts.inference.engines import TinyModel, engine_config
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.service import serving

LOG = EventLog("test", echo=sys.stdout)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def write_step(directory: RunDirectory, *, wait_s: float, step_s: float) -> None:
    row = {"time": time.time(), "process": "trainer", "perf/sample_wait_time": wait_s, "perf/step_time": step_s}
    with directory.metrics_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


async def test_a_trainer_that_waits_while_the_gate_is_open_gets_another_dispatcher(directory: RunDirectory) -> None:
    tiny = TinyModel(root=directory.path)
    async with (
        serving(directory.path) as (url, _),
        open_ledger_client(url, RUN, request_s=10, log=LOG) as ledger,
        tiny.engine("scripted") as engine,
        serve(build_app(engine, engine_config("scripted"))) as policy,
    ):
        await ledger.create_run(settings(per_step=4))
        await ledger.take_role(restored_step=0)
        await ledger.confirm(await ledger.register(0, "digest"))
        observer = RunObserver(
            ledger,
            replicas=[policy, "http://127.0.0.1:9"],
            metrics_file=directory.metrics_file,
            groups_per_step=4,
            window_s=60,
        )
        write_step(directory, wait_s=3.0, step_s=4.0)
        running = [engine.submit([1, 2, 3], SamplingParams(max_tokens=100)) for _ in range(3)]
        seen = await observer.observe()
        await asyncio.gather(*running)
        assert seen.trainer_wait == pytest.approx(0.75)
        assert (seen.policy_load, seen.num_policies) == (3, 1)
        assert seen.gate_free > 0
        config = AutoscaleConfig(max_rollout=2, interval_s=0.01, hold_s=0.05)
        autoscaler = asyncio.create_task(Autoscaler(config, directory, observer, log=LOG).run())
        async with asyncio.timeout(30):
            while Scale.read(directory) != Scale(rollout=2):  # noqa: ASYNC110  # a file cannot be awaited
                await asyncio.sleep(0.01)
        autoscaler.cancel()
        await asyncio.gather(autoscaler, return_exceptions=True)
        await observer.close()
