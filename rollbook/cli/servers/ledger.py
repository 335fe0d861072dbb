"""`rollbook ledger serve|compact|export|import`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollbook.cli.arguments import AllowHost, AllowOrigin, TokenFile, verb_group
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.servers.ledger import compact_store, export_run, import_run_file, serve, store_of

ledger_app = verb_group()

Store = Annotated[str, typer.Option("--store", help="sqlite:///DIR, postgresql://…, or a run directory.")]


@ledger_app.command("serve")
def serve_command(  # noqa: PLR0917 - a command line is a list of flags
    store: Store = "sqlite:///ledger",
    host: Annotated[
        str, typer.Option("--host", help="Addresses other than loopback need --token-file or a token per role.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose a port.")] = 8000,
    durability: Annotated[
        Literal["power_loss", "process_crash"], typer.Option("--durability", help="power_loss or process_crash.")
    ] = "power_loss",
    payloads: Annotated[
        str | None,
        typer.Option(
            "--payloads", help="With PostgreSQL: directory or s3://bucket/prefix of payloads. Default: in the database."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written with the address once the server is ready.")
    ] = None,
    atropos_run: Annotated[
        str | None, typer.Option("--atropos-run", help="Also serve the Atropos API at the root, for this run.")
    ] = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    producer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_PRODUCER_TOKENS")] = None,
    trainer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_TRAINER_TOKENS")] = None,
    viewer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_VIEWER_TOKENS")] = None,
    operator_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_OPERATOR_TOKENS")] = None,
) -> None:
    """Serve the native API, and with --atropos-run also the Atropos API."""
    console = stderr_console()
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
        say=lambda text: console.print(text, markup=False),
    )


@ledger_app.command("compact")
def compact_command(
    store: Store,
    run: Annotated[str | None, typer.Option("--run", help="Also delete payloads of this run.")] = None,
    up_to_step: Annotated[
        int | None, typer.Option("--up-to-step", min=0, help="With --run: payloads of batches up to this step.")
    ] = None,
) -> None:
    """Free the disk space of deleted data. Stop all servers of the store first."""
    result_json(compact_store(store_of(store), run=run, up_to_step=up_to_step))


@ledger_app.command("export")
def export_command(
    store: Store,
    run: Annotated[str, typer.Option("--run", help="The run to export.")],
    target: Annotated[Path, typer.Argument(help="A new .jsonl file, or a new directory for Parquet files.")],
) -> None:
    """Export a run as JSON lines, or as Parquet if the target does not end in .jsonl."""
    result_json(export_run(store_of(store), run, target))


@ledger_app.command("import")
def import_command(
    store: Store,
    source: Annotated[Path, typer.Argument(help="A .jsonl file written by `export`.")],
    as_run: Annotated[str | None, typer.Option("--as", help="Import it under another name.")] = None,
) -> None:
    """Import a run. It is audited before it is committed."""
    result_json(import_run_file(store_of(store), source, as_run=as_run))
