"""`rollbook sft`: a warm start from demonstrations."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import result_json
from rollbook.run.commands.sft import warm_start


def sft(
    config: Annotated[
        Path, typer.Argument(help="The TOML file of the warm start, or a directory of one to go on with.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Where it lives; the same directory again resumes.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
) -> None:
    """Train a model on chats, the assistant's tokens only. The result is a model directory for `model.path` of a run."""
    report = warm_start(config, out=out, overrides=override or ())
    result_json(report.row)
    raise typer.Exit(report.exit_code)
