"""The supervisor announces its run in the ledger's service, so that `rollbook join LEDGER_URL` needs no run directory."""

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollbook import __version__
from rollbook.access.tokens import read_token
from rollbook.contracts.admission import BEATS_PER_LEASE, LEASE_S
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.config import RunLedgerConfig
from rollbook.ledger.http.wire import Announcement
from rollbook.run.config.run import LoadedConfig, RunConfig, dump_toml
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.telemetry.events import EventLog


def announcement_of(config: RunConfig, directory: RunDirectory, addresses: Mapping[str, str]) -> Announcement:
    """The model directory must exist."""
    public = config.model_copy(
        update={
            # A member needs no other setting of the ledger, and the URL of the store may contain a password.
            "ledger": RunLedgerConfig(url=config.ledger.url, request_s=config.ledger.request_s),
            "env": config.env.model_copy(update={"token": None}),
        }
    )
    files = (directory.token_file, directory.client_token_file)
    return Announcement(
        directory_id=directory.id,
        version=__version__,
        config=dump_toml(public),
        addresses=dict(addresses),
        tokens={file.name: read_token(file) for file in files},
        tokenizer_digest=tokenizer_digest(directory.initial_model),
        needs_env_token=config.env.token is not None,
    )


def tokenizer_digest(model_dir: Path) -> str:
    """Empty if the model has no tokenizer."""
    try:
        return hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


async def announce(
    loaded: LoadedConfig, directory: RunDirectory, addresses: Mapping[str, str], *, log: EventLog
) -> None:
    """Announce the run to every replica of the ledger's service.

    Waits:  a third of the time after which an announcement ends.
    Ends:   on cancellation.
    """
    announcement = announcement_of(loaded.config, directory, addresses)

    async def repeat(url: str) -> None:
        async with open_run_ledger(loaded, directory, url, log=log, is_trainer=True) as ledger:
            while True:
                with suppress(RollbookError):
                    await ledger.announce(announcement)
                await asyncio.sleep(LEASE_S / BEATS_PER_LEASE)

    async with asyncio.TaskGroup() as group:
        for url in addresses["ledger"].split(","):
            group.create_task(repeat(url), name=f"run.announce {url}")
