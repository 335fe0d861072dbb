"""`rollbook ledger serve|compact|export|import`, and `audit` and `explain` of a remote ledger."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from pydantic import SecretStr

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import steering_token_file
from rollbook.contracts.admission import AuditReport, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.atropos.tables import AtroposExtension
from rollbook.ledger.client.blocking import audit_at, explain_at
from rollbook.ledger.config import Durability, LedgerConfig, LedgerServerConfig, StoreUrl
from rollbook.ledger.serve import serve_ledger
from rollbook.ledger.store import Reader
from rollbook.ledger.stores.registry import only_service, open_reader, open_store, reclaim, sqlite_url, store_warnings
from rollbook.ledger.tools.compaction import compact
from rollbook.ledger.tools.export import ExportReport, export_jsonl
from rollbook.ledger.tools.import_run import import_jsonl
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import store_url
from rollbook.run.reader import audit_report, open_run
from rollbook.telemetry.events import EventLog


def serve(
    *,
    store: str,
    host: str,
    port: int,
    durability: str,
    payloads: str | None,
    token_file: Path | None,
    tokens: dict[str, Sequence[str]],
    allowed_hosts: Sequence[str],
    allowed_origins: Sequence[str],
    ready_file: Path | None,
    atropos_run: str | None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. With `atropos_run`, the Atropos API of that run is served too."""
    config = LedgerServerConfig(
        store=store,
        host=host,
        port=port,
        ready_file=ready_file,
        token_file=steering_token_file(token_file, host=host, has_others=any(tokens.values())),
        allowed_hosts=tuple(allowed_hosts),
        allowed_origins=tuple(allowed_origins),
        ledger=LedgerConfig(durability=Durability(durability), payloads=payloads),
        producer_tokens=tuple(SecretStr(token) for token in tokens.get("producer", ())),
        trainer_tokens=tuple(SecretStr(token) for token in tokens.get("trainer", ())),
        viewer_tokens=tuple(SecretStr(token) for token in tokens.get("viewer", ())),
        operator_tokens=tuple(SecretStr(token) for token in tokens.get("operator", ())),
    )
    dialects = [] if atropos_run is None else [atropos_dialect(AtroposConfig(run=atropos_run))]
    say(f"opening {StoreUrl(store)} ({durability}), listening on {host}:{port}")
    for warning in store_warnings(store):
        say(f"warning: {warning}")
    if config.token_file is not None:
        needs_it = "requests of a trainer need" if is_loopback(host) and not any(tokens.values()) else "requests need"
        say(f"{needs_it} the token in {config.token_file}: 'Authorization: Bearer …'")
    uvloop.run(serve_ledger(config, log=EventLog("ledger"), dialects=dialects))


def compact_store(store: str, *, run: str | None, up_to_step: int | None) -> dict[str, Any]:
    """Raises if there is no ledger: opening a store would create one."""

    async def delete_payloads() -> tuple[int, int]:
        async with open_store(store) as opened:
            run_id = None if run is None else RunId(run)
            return await compact(opened, now=time.time(), run_id=run_id, up_to_step=up_to_step)

    with open_reader(store):
        pass
    with only_service(store):
        num_payloads, num_bytes = asyncio.run(delete_payloads())
        before, after = reclaim(store)
    return {"payloads": num_payloads, "payload_bytes": num_bytes, "bytes_before": before, "bytes_after": after}


def export_run(store: str, run: str, target: Path) -> dict[str, Any]:
    """Export a run as JSON lines, or as Parquet if the target does not end in .jsonl."""
    with open_reader(store) as reader:
        if target.suffix == ".jsonl":
            report = export_jsonl(reader, RunId(run), target, extensions=[AtroposExtension()])
        else:
            export: Callable[[Reader, RunId, Path], ExportReport] = load_on_demand(
                "rollbook.ledger.tools.parquet:export_parquet"
            )
            report = export(reader, RunId(run), target)
    return {**asdict(report), "files": [str(path) for path in report.files]}


def import_run_file(store: str, source: Path, *, as_run: str | None) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with open_store(store) as opened:
            run_id = None if as_run is None else RunId(as_run)
            return asdict(await import_jsonl(opened, source, as_run=run_id, extensions=[AtroposExtension()]))

    return asyncio.run(work())


def explain_in_directory(path: Path, group_id: str) -> list[str]:
    with open_run(path) as run:
        return list(run.explain(GroupId(group_id)).sentences)


def explain_remote(url: str, group_id: str) -> list[str]:
    """`http://host:port/v1/runs/RUN`, or `http://host:port` of a ledger with one run."""
    history = explain_at(url, GroupId(group_id), token=os.environ.get("ROLLBOOK_VIEWER_TOKENS"))
    return list(history.sentences)


def audit_remote(url: str, *, full: bool = False) -> list[AuditReport]:
    """`http://host:port/v1/runs/RUN` for one run, `http://host:port` for all runs of a ledger."""
    return [audit_report(view) for view in audit_at(url, token=os.environ.get("ROLLBOOK_VIEWER_TOKENS"), full=full)]


def store_of(location: str) -> str:
    """The URL of a store; `location` is a URL or a run directory."""
    if "://" in location:
        return location
    directory = RunDirectory(Path(location).resolve())
    if not directory.exists:
        return sqlite_url(directory.ledger)
    config = load_resolved_config(directory).config.ledger
    if config.url is not None:
        raise RunError(
            f"the ledger of {location} is the service at {config.url}: name the store of that service instead"
        )
    return store_url(config, directory)
