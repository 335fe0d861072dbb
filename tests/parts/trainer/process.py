"""A trainer in a separate process that uses a real ledger over HTTP. The process can be killed at any moment."""

import asyncio
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.ledger.client.client import open_ledger_client
from rollbook.telemetry.events import EventLog
from rollbook.trainer.config import TrainerConfig
from tests.parts.trainer.batches import quick
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop


def train(url: str, run: str, directory: str, settings: dict[str, object]) -> None:
    """The entry point of the process: train to the end of the run."""
    asyncio.run(_train(url, RunId(run), Path(directory), quick(**settings)))


async def _train(url: str, run: RunId, directory: Path, config: TrainerConfig) -> None:
    log = EventLog("ledger-client", directory / "logs" / "client.jsonl")
    async with open_ledger_client(url, run, request_s=30.0, log=log) as ledger:
        await TinyLoop(ledger, FakeReplicas(), directory, config).run()
