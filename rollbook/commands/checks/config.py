"""`rollbook config check`: validates a config file and runs the user's code once. Needs no GPU library."""

from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, Overrides, UsePreflight
from rollbook.commands.output import result, stderr_console
from rollbook.run.config.run import ConfigError, dump_toml, load_config, located
from rollbook.run.preflight.report import check_run, print_preflight
from rollbook.run.resources.automatic import resolve
from rollbook.run.resources.machine import this_machine


def check_command(
    config: Annotated[Path, Argument(help="The run's TOML file.")],
    override: Overrides = None,
    preflight: UsePreflight = True,
) -> None:
    """Report every fault at once with its line in the file, or print the configuration as it is resolved on this machine."""
    found = resolve(load_config(config, override or ()), this_machine())
    loaded = found.loaded
    if faults := found.faults(needs_gpus=False):
        raise ConfigError(str(config), located(faults, config, override or ()))
    for warning in found.missing_gpu:
        stderr_console().print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if preflight:
        print_preflight(check_run(loaded, override or ()), stderr_console())
    result(dump_toml(loaded.config, masks_secrets=True).rstrip())
    # Last: the configuration has hundreds of lines, and the verdict would scroll away.
    stderr_console().print(f"{config}: ok", markup=False, style="green")


COMMANDS = {"check": check_command}
