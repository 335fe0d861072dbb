"""The Atropos API on a server in this process, and a client for it."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from rollbook.access.guard import AllowedClients
from rollbook.concurrency.clock import Clock
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.serve import ledger_service_on
from rollbook.ledger.service import Ledger
from rollbook.ledger.store import Store
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import EventLog

RUN = RunId("atropos")


class Client:
    """Sends requests as Atropos clients do."""

    def __init__(self, session: ClientSession, url: str, ledger: Ledger) -> None:
        self.session = session
        self.url = url
        self.ledger = ledger

    async def get(self, path: str, body: Any = None, **options: Any) -> Any:
        async with self.session.get(self.url + path, json=body, **options) as answer:
            return json.loads(await answer.text()) if "json" in answer.content_type else await answer.text()

    async def status_of(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if "json" in answer.content_type else text

    async def post(self, path: str, body: Any) -> Any:
        status, answer = await self.status_of("POST", path, json=body)
        assert status == 200, answer
        return answer

    async def register(self, batch_size: int, *, starting_step: int = 0) -> None:
        answer = await self.post("/register", registration(batch_size, starting_step=starting_step))
        assert isinstance(answer["uuid"], int)

    async def start(self, batch_size: int) -> None:
        """Register and request one batch, so that environments may register."""
        await self.register(batch_size)
        assert (await self.get("/batch"))["batch"] is None

    async def env(
        self, name: str = "env", *, group_size: int = 2, minimum: float | None = None, weight: float = 1
    ) -> int:
        asked = {"max_token_length": 10, "desired_name": name, "weight": weight, "group_size": group_size}
        answer = await self.post("/register-env", {**asked, "min_batch_allocation": minimum})
        assert answer["status"] == "success"
        return int(answer["env_id"])

    async def batch(self) -> list[str] | None:
        """The names of the groups in the next batch."""
        found = (await self.get("/batch"))["batch"]
        return None if found is None else [name_of(group) for group in found]

    async def audited(self, run_id: RunId = RUN) -> dict[str, int]:
        report = await self.ledger.read(lambda tx: audit_run(tx, run_id))
        assert report.violations == ()
        return {state: num for state, num in report.law.items() if num}


def registration(batch_size: int, *, starting_step: int = 0) -> dict[str, Any]:
    return {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": batch_size,
        "max_token_len": 99,
        "checkpoint_dir": "here",
        "save_checkpoint_interval": 5,
        "starting_step": starting_step,
        "num_steps": 9,
    }


def scored(name: int | str, size: int = 2, *, env_id: int | None = None, **more: Any) -> dict[str, Any]:
    """A group whose name is its first token."""
    tokens = [[int(name), at, 7] for at in range(size)]
    masks = [[-100, *row[1:]] for row in tokens]
    return {"tokens": tokens, "masks": masks, "scores": [float(at) for at in range(size)], "env_id": env_id, **more}


def name_of(group: dict[str, Any]) -> str:
    return str(group["tokens"][0][0])


@asynccontextmanager
async def dialect_on(
    store: Store,
    *,
    config: AtroposConfig | None = None,
    limits: LedgerConfig | None = None,
    clock: Clock | None = None,
    allowed: AllowedClients | None = None,
) -> AsyncIterator[Client]:
    log, dialects = EventLog("atropos", echo=sys.stdout), [atropos_dialect(config or AtroposConfig())]
    with listening_socket("127.0.0.1", 0) as sock:
        async with (
            ledger_service_on(store, limits or LedgerConfig(), log=log, clock=clock, dialects=dialects) as service,
            service.serving(sock.dup(), drain_s=5, allowed=allowed),
            ClientSession() as session,
        ):
            yield Client(session, url_of(sock), service.ledger)


@asynccontextmanager
async def dialect(
    directory: Path,
    *,
    config: AtroposConfig | None = None,
    limits: LedgerConfig | None = None,
    clock: Clock | None = None,
    allowed: AllowedClients | None = None,
) -> AsyncIterator[Client]:
    async with (
        open_sqlite_store(directory) as store,
        dialect_on(store, config=config, limits=limits, clock=clock, allowed=allowed) as client,
    ):
        yield client
