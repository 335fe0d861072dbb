"""`rollbook config check`: validates a config file and runs the user's code once. Needs no GPU library."""

from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, Overrides, UsePreflight
from rollbook.commands.output import result, stderr_console
from rollbook.run.config.run import dump_toml, load_config
from rollbook.run.preflight.report import check_run, print_preflight


def check_command(
    config: Annotated[Path, Argument(help="The run's TOML file.")],
    override: Overrides = None,
    preflight: UsePreflight = True,
) -> None:
    """Report every fault at once with its line in the file, or print the resolved configuration."""
    loaded = load_config(config, override or ())
    if preflight:
        print_preflight(check_run(loaded, override or ()), stderr_console())
    result(dump_toml(loaded.config, masks_secrets=True).rstrip())
    # Last: the configuration has hundreds of lines, and the verdict would scroll away.
    stderr_console().print(f"{config}: ok", markup=False, style="green")


COMMANDS = {"check": check_command}
