"""`rollbook replay`: trains recorded batches again, to compare weight digests or to try another loss."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rollbook.cli.arguments import AsJson
from rollbook.cli.output import EXIT_FAILED, result_json, stderr_console
from rollbook.commands.record.replay import LossComparison
from rollbook.commands.record.replay import replay as run_replay


def replay(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit non-zero if a digest differs from the recorded one.")
    ] = False,
    until: Annotated[int | None, typer.Option("--until", min=1, help="Stop after this step.")] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss", help="Train with another loss on the same batches and compare it with the recorded one."
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="trainer.FIELD=VALUE", help="Override a trainer setting; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the curves; default: in the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the recorded batches again from the initial weights, without generation. The record is only read."""
    if verify and (loss is not None or override):
        raise typer.BadParameter("--verify cannot be combined with --loss or --set")
    report = run_replay(run, until=until, loss=loss, overrides=override or (), out=out)
    if as_json:
        result_json(report.row())
    if isinstance(report, LossComparison):
        _print_comparison(report.row())
        return
    if report.is_exact:
        stderr_console().print(f"{report.steps} steps reproduced bit for bit", style="green")
    else:
        stderr_console().print(f"the weights differ from step {report.diverged_at} on", style="red")
        if verify:
            raise typer.Exit(EXIT_FAILED)


def _print_comparison(report: dict[str, Any]) -> None:
    rows = report["table"]
    names = [name for name in rows[0] if name != "measure"]
    shown = Table(title=f"{report['steps']} recorded steps: first tenth → last tenth", title_justify="left")
    for heading in ("", *names):
        shown.add_column(heading, no_wrap=True)
    for row in rows:
        shown.add_row(row["measure"], *(_arrow(*row[name]) for name in names))
    stderr_console().print(shown)
    for name, (before, after) in report["changed"].items():
        stderr_console().print(f"  {name}: {before!r} → {after!r}", markup=False)
    stderr_console().print(f"plot: {report['picture']}", markup=False, soft_wrap=True)


def _arrow(first: float | None, last: float | None) -> str:
    return "–" if first is None or last is None else f"{first:.4g} → {last:.4g}"
