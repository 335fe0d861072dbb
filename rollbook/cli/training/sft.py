"""`rollbook sft`: supervised fine-tuning on demonstrations."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import Overrides
from rollbook.cli.output import result_json
from rollbook.commands.training.sft import run_sft


def sft(
    config: Annotated[Path, typer.Argument(help="The TOML file, or an output directory to resume.")],
    out: Annotated[Path | None, typer.Option("--out", help="The output directory; an existing one is resumed.")] = None,
    override: Overrides = None,
) -> None:
    """Train a model on chats, the assistant's tokens only. The result is a model directory for `model.path` of a run."""
    report = run_sft(config, out=out, overrides=override or ())
    result_json(report.row)
    raise typer.Exit(report.exit_code)
