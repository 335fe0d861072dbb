"""Actions of operators on a run: through its ledger service or, when the run is stopped, in its store."""

import asyncio
import json
import os
import time
from pathlib import Path

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import Action, ActionKind, RunId
from rollbook.contracts.errors import UsageError
from rollbook.ledger.client.blocking import split_address
from rollbook.ledger.client.client import open_ledger_client
from rollbook.ledger.service import Ledger
from rollbook.ledger.store import StoreInUseError
from rollbook.ledger.stores.registry import only_service, open_store
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger, store_url
from rollbook.telemetry.events import EventLog

REQUEST_S = 20.0
"""A person waits for the response. A restart of the ledger takes less."""
STORE_POLL_S = 0.1
TOKENS = ("ROLLBOOK_OPERATOR_TOKENS", "ROLLBOOK_TRAINER_TOKENS")


async def act(
    target_run: str,
    kind: ActionKind,
    *,
    author: str,
    target: str = "",
    sample: int | None = None,
    note: str = "",
) -> Action:
    """`target_run` is a run directory, or the address of a run: `http://host:8000/v1/runs/RUN`."""
    if target_run.startswith(("http://", "https://")):
        return await act_on_ledger(target_run, kind, author=author, target=target, sample=sample, note=note)
    directory = RunDirectory(Path(target_run).resolve())
    return await act_on_directory(directory, kind, author=author, target=target, sample=sample, note=note)


async def act_on_directory(
    directory: RunDirectory,
    kind: ActionKind,
    *,
    author: str,
    target: str = "",
    sample: int | None = None,
    note: str = "",
) -> Action:
    """While a run starts or ends, its store is in use and its service does not respond yet or any more: the action waits."""
    loaded = load_resolved_config(directory)
    config, log = loaded.config, EventLog("operator")
    until = time.monotonic() + REQUEST_S
    while config.ledger.url is None and not directory.is_running():
        try:
            with only_service(url := store_url(config.ledger, directory)):
                async with open_store(url, durability=config.ledger.durability) as store:
                    ledger = Ledger(store=store, config=config.ledger, clock=SystemClock(), log=log)
                    run_id = RunId(config.run.name)
                    done = await ledger.act(run_id, kind, author=author, target=target, sample=sample, note=note)
                    return done.contract
        except StoreInUseError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(STORE_POLL_S)
    address = config.ledger.url or json.loads(directory.addresses_file.read_text(encoding="utf-8"))["ledger"]
    async with open_run_ledger(loaded, directory, address, log=log, is_trainer=True) as client:
        return await client.act(kind, author=author, target=target, sample=sample, note=note)


async def act_on_ledger(
    url: str, kind: ActionKind, *, author: str, target: str = "", sample: int | None = None, note: str = ""
) -> Action:
    """The token of an operator or of the trainer is read from the environment."""
    base, run_id = split_address(url)
    if run_id is None:
        raise UsageError(f"{url} does not name a run: use {base}/v1/runs/RUN")
    token = next((os.environ[name] for name in TOKENS if os.environ.get(name)), None)
    async with open_ledger_client(base, run_id, request_s=REQUEST_S, token=token) as client:
        return await client.act(kind, author=author, target=target, sample=sample, note=note)
