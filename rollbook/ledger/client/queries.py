"""Questions to a ledger over HTTP, from the command line: which runs, does a run add up, what happened to a group."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import wire
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

REQUEST_S = 10.0
"""A person waits for the answer."""


def split_url(url: str) -> tuple[str, RunId | None]:
    """The ledger's own address, and the run where the url names one: `http://host:8000/v1/runs/RUN`."""
    parts = urlsplit(url)
    base, found, rest = parts.path.partition("/v1/runs/")
    run = unquote(rest.split("/")[0]) if found else ""
    return f"{parts.scheme}://{parts.netloc}{base.rstrip('/')}", RunId(run) if run else None


def audit_at(url: str, *, token: str | None = None) -> list[wire.AuditView]:
    """The audit of the run that the url names, or of every run of that ledger."""

    async def ask() -> list[wire.AuditView]:
        base, run_id = split_url(url)
        run_ids = [run_id] if run_id is not None else await _runs(base, token)
        return [await _of_run(base, one, token, LedgerClient.audit) for one in run_ids]

    return asyncio.run(ask())


def explain_at(url: str, group_id: GroupId, *, token: str | None = None) -> wire.Life:
    """The life of one group of the run that the url names, or of the only run of that ledger."""

    async def ask() -> wire.Life:
        base, run_id = split_url(url)
        if run_id is None:
            run_ids = await _runs(base, token)
            if len(run_ids) != 1:
                known = ", ".join(run_ids) or "none"
                raise RunError(f"the ledger at {base} has these runs: {known}; name one: {base}/v1/runs/RUN")
            run_id = run_ids[0]
        return await _of_run(base, run_id, token, lambda client: client.explain(group_id))

    return asyncio.run(ask())


async def _of_run(base: str, run_id: RunId, token: str | None, ask: Callable[[LedgerClient], Awaitable[T]]) -> T:
    async with open_ledger_client(
        base, run_id, request_s=REQUEST_S, log=EventLog("ledger-client"), token=token
    ) as client:
        return await ask(client)


async def _runs(base: str, token: str | None) -> list[RunId]:
    headers = {"Accept": wire.JSON_CONTENT_TYPE} | ({"Authorization": f"Bearer {token}"} if token else {})
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base}/v1/runs", headers=headers) as response,
        ):
            body = await response.read()
            if response.status != HTTPStatus.OK:
                raise RunError(
                    f"the ledger at {base} refused to list its runs ({response.status}): {body[:500].decode()}"
                )
            return [RunId(run) for run in msgspec.json.decode(body, type=list[str])]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransientError(f"the ledger at {base} cannot be reached ({type(error).__name__}): {error}") from error
    except msgspec.MsgspecError as error:
        raise RunError(f"what answers at {base} is no ledger: {error}") from error
