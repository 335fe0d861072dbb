"""A trainer in a separate process that uses a real ledger over HTTP. The process can be killed at any moment."""

import asyncio
import os
import signal
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.ledger.client.client import open_ledger_client
from rollbook.telemetry.events import EventLog
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.passes import Microbatch
from tests.parts.trainer.batches import quick
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop
from tests.parts.trainer.memory import small_device


def train(url: str, run: str, directory: str, settings: dict[str, object]) -> None:
    """The entry point of the process: train to the end of the run."""
    asyncio.run(_train(url, RunId(run), Path(directory), quick(**settings)))


def train_on_a_small_device(
    url: str, run: str, directory: str, settings: dict[str, object], device: tuple[int, bool]
) -> None:
    """The same on a device for passes of so many tokens. If the second part of `device` is true, the process kills itself in the
    first pass after one that did not fit."""
    max_tokens, kills_after_failure = device

    def before_pass(_: Microbatch) -> None:
        if kills_after_failure and max(sizes) > max_tokens:
            os.kill(os.getpid(), signal.SIGKILL)

    with small_device(max_tokens, before_pass=before_pass) as sizes:
        train(url, run, directory, settings)


async def _train(url: str, run: RunId, directory: Path, config: TrainerConfig) -> None:
    log = EventLog("ledger-client", directory / "logs" / "client.jsonl")
    async with open_ledger_client(url, run, request_s=30.0, log=log) as ledger:
        await TinyLoop(ledger, FakeReplicas(), directory, config).run()
