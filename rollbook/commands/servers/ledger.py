"""`rollbook ledger serve|compact|rebuild|export|import`: a ledger without a run, and its store."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from pydantic import SecretStr

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import steering_token_file
from rollbook.commands.arguments import AllowHost, AllowOrigin, Argument, Option, Port, ReadyFile, TokenFile
from rollbook.commands.output import EXIT_FAILED, result_json, say
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.atropos.tables import AtroposExtension
from rollbook.ledger.config import Durability, LedgerConfig, LedgerServerConfig, StoreUrl
from rollbook.ledger.serve import serve_ledger
from rollbook.ledger.store import Reader
from rollbook.ledger.stores.registry import (
    only_service,
    open_reader,
    open_store,
    reclaim,
    sqlite_directory,
    sqlite_url,
    store_warnings,
)
from rollbook.ledger.tools.compaction import compact
from rollbook.ledger.tools.export import ExportReport, export_jsonl
from rollbook.ledger.tools.import_run import import_jsonl
from rollbook.ledger.tools.rebuild import rebuild
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import store_url
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


def rebuild_store(store: str) -> dict[str, Any]:
    """Rebuild a SQLite store from its journal."""
    with only_service(store):
        report = rebuild(sqlite_directory(store))
    return {
        "ok": report.ok,
        "runs": [{**asdict(run), "ok": run.ok} for run in report.runs],
        "old_files": str(report.old_files),
    }


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


Store = Annotated[str, Option("--store", help="sqlite:///DIR, postgresql://…, or a run directory.")]


def serve_command(  # noqa: PLR0917 - a command line is a list of flags
    store: Store = "sqlite:///ledger",
    host: Annotated[
        str, Option("--host", help="Addresses other than loopback need --token-file or a token per role.")
    ] = "127.0.0.1",
    port: Port = 8000,
    durability: Annotated[
        Literal["power_loss", "process_crash"], Option("--durability", help="power_loss or process_crash.")
    ] = "power_loss",
    payloads: Annotated[
        str | None,
        Option(
            "--payloads", help="With PostgreSQL: directory or s3://bucket/prefix of payloads. Default: in the database."
        ),
    ] = None,
    ready_file: ReadyFile = None,
    atropos_run: Annotated[
        str | None, Option("--atropos-run", help="Also serve the Atropos API at the root, for this run.")
    ] = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    producer_token: Annotated[
        list[str] | None,
        Option(
            "--producer-token",
            variable="ROLLBOOK_PRODUCER_TOKENS",
            help="Token of programs that submit groups; may be repeated. Other users can see an argument: prefer the variable.",
        ),
    ] = None,
    trainer_token: Annotated[
        list[str] | None,
        Option("--trainer-token", variable="ROLLBOOK_TRAINER_TOKENS", help="The same of trainers."),
    ] = None,
    viewer_token: Annotated[
        list[str] | None,
        Option("--viewer-token", variable="ROLLBOOK_VIEWER_TOKENS", help="The same of programs that only read."),
    ] = None,
    operator_token: Annotated[
        list[str] | None,
        Option("--operator-token", variable="ROLLBOOK_OPERATOR_TOKENS", help="The same of people who act on runs."),
    ] = None,
) -> None:
    """Serve the native API, and with --atropos-run also the Atropos API."""
    serve(
        store=store_of(store),
        host=host,
        port=port,
        durability=durability,
        payloads=payloads,
        token_file=token_file,
        allowed_hosts=allow_host or (),
        allowed_origins=allow_origin or (),
        tokens={
            "producer": producer_token or (),
            "trainer": trainer_token or (),
            "viewer": viewer_token or (),
            "operator": operator_token or (),
        },
        ready_file=ready_file,
        atropos_run=atropos_run,
        say=say,
    )


def compact_command(
    store: Store,
    run: Annotated[str | None, Option("--run", help="Also delete payloads of this run.")] = None,
    up_to_step: Annotated[
        int | None, Option("--up-to-step", min=0, help="With --run: payloads of batches up to this step.")
    ] = None,
) -> None:
    """Free the disk space of deleted data. Stop all servers of the store first."""
    result_json(compact_store(store_of(store), run=run, up_to_step=up_to_step))


def rebuild_command(store: Store) -> int:
    """Rebuild a damaged or missing SQLite database from its journal and payload files. Stop all servers of the store first.

    Restores everything up to the last acknowledged step; the damaged files are kept.
    """
    report = rebuild_store(store_of(store))
    result_json(report)
    return 0 if report["ok"] else EXIT_FAILED


def export_command(
    store: Store,
    run: Annotated[str, Option("--run", help="The run to export.")],
    target: Annotated[Path, Argument(help="A new .jsonl file, or a new directory for Parquet files.")],
) -> None:
    """Export a run as JSON lines, or as Parquet if the target does not end in .jsonl."""
    result_json(export_run(store_of(store), run, target))


def import_command(
    store: Store,
    source: Annotated[Path, Argument(help="A .jsonl file written by `export`.")],
    as_run: Annotated[str | None, Option("--as", help="Import it under another name.")] = None,
) -> None:
    """Import a run. It is audited before it is committed."""
    result_json(import_run_file(store_of(store), source, as_run=as_run))


COMMANDS = {
    "serve": serve_command,
    "compact": compact_command,
    "rebuild": rebuild_command,
    "export": export_command,
    "import": import_command,
}
