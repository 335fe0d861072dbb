"""`rollbook config check`: validates a config file. Needs no GPU library and starts nothing."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import Overrides, verb_group
from rollbook.cli.output import result, stderr_console
from rollbook.run.config.run import dump_toml, load_config

config_app = verb_group()


@config_app.command()
def check(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    override: Overrides = None,
) -> None:
    """Report every fault at once with its path in the file, or print the resolved configuration."""
    loaded = load_config(config, override or ())
    stderr_console().print(f"{config}: ok", markup=False, style="green")
    result(dump_toml(loaded.config).rstrip())
