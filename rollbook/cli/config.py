"""`rollbook config check`: is this file a run that could start? Needs no GPU library and starts nothing."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.speaking import people, result
from rollbook.run.config.run import dump_toml, load_config

config_app = typer.Typer(help="Check configurations.", no_args_is_help=True)


@config_app.callback()
def _root() -> None:
    """Check configurations."""


@config_app.command()
def check(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
) -> None:
    """Report every fault at once with its path in the file, or print the resolved configuration."""
    loaded = load_config(config, override or ())
    people().print(f"{config}: ok", markup=False, style="green")
    result(dump_toml(loaded.config).rstrip())
