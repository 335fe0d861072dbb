"""A trainer in a process of its own, against a real ledger over HTTP: something that can be killed at any moment."""

import asyncio
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.ledger.client.client import open_ledger_client
from rollbook.telemetry.events import EventLog
from rollbook.trainer.config import TrainerConfig
from tests.parts.trainer.ledger import MemoryReplicas, trainer_loop


def train(url: str, run: str, directory: str, settings: dict[str, object]) -> None:
    """Train to the end of the run. The entry point of the process."""
    asyncio.run(_train(url, RunId(run), Path(directory), TrainerConfig.model_validate(settings)))


async def _train(url: str, run: RunId, directory: Path, config: TrainerConfig) -> None:
    log = EventLog("ledger-client", directory / "logs" / "client.jsonl")
    async with open_ledger_client(url, run, request_s=30.0, log=log) as ledger:
        await trainer_loop(ledger, MemoryReplicas(), directory, config, max_head_offpolicy_versions=0).run()
