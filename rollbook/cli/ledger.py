"""`rollbook ledger serve|compact|export|import`."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import people, result_json
from rollbook.run.commands.serve_ledger import read_in, serve, shrink, store_of, write_out

ledger_app = typer.Typer(help="Run a ledger on its own, and look after its store.", no_args_is_help=True)

Store = Annotated[str, typer.Option("--store", help="sqlite:///DIR, postgresql://…, or a run directory.")]


@ledger_app.command("serve")
def serve_command(  # noqa: PLR0917 - a command line is a list of flags
    store: Store = "sqlite:///ledger",
    host: Annotated[str, typer.Option("--host", help="Anywhere but loopback, each role needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose.")] = 8000,
    durability: Annotated[str, typer.Option("--durability", help="power_loss or process_crash.")] = "power_loss",
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written with the address once it answers.")
    ] = None,
    atropos_run: Annotated[
        str | None, typer.Option("--atropos-run", help="Speak the Atropos dialect at the root, for this run.")
    ] = None,
    producer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_PRODUCER_TOKENS")] = None,
    trainer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_TRAINER_TOKENS")] = None,
    viewer_token: Annotated[list[str] | None, typer.Option(envvar="ROLLBOOK_VIEWER_TOKENS")] = None,
) -> None:
    """Serve the native API, and with --atropos-run the Atropos dialect beside it."""
    console = people()
    serve(
        store=store_of(store),
        host=host,
        port=port,
        durability=durability,
        tokens={"producer": producer_token or (), "trainer": trainer_token or (), "viewer": viewer_token or ()},
        ready_file=ready_file,
        atropos_run=atropos_run,
        say=lambda text: console.print(text, markup=False),
    )


@ledger_app.command("compact")
def compact_command(
    store: Store,
    run: Annotated[str | None, typer.Option("--run", help="Let payloads of this run go, too.")] = None,
    up_to_step: Annotated[
        int | None, typer.Option("--up-to-step", min=0, help="With --run: of batches up to this.")
    ] = None,
) -> None:
    """Give back the room of what was deleted; nothing may be serving the store meanwhile."""
    result_json(shrink(store_of(store), run=run, up_to_step=up_to_step))


@ledger_app.command("export")
def export_command(
    store: Store,
    run: Annotated[str, typer.Option("--run", help="Which run.")],
    target: Annotated[Path, typer.Argument(help="A new file of JSON lines, or a new directory of Parquet files.")],
) -> None:
    """Write a run out: JSON lines, or Parquet when the target has no .jsonl ending."""
    result_json(write_out(store_of(store), run, target))


@ledger_app.command("import")
def import_command(
    store: Store,
    source: Annotated[Path, typer.Argument(help="JSON lines that `export` wrote.")],
    as_run: Annotated[str | None, typer.Option("--as", help="Under another name.")] = None,
) -> None:
    """Read a run in; audited before it is committed."""
    result_json(read_in(store_of(store), source, as_run=as_run))
