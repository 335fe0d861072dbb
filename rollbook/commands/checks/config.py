"""`rollbook config check`: validates a config file, looks at the machine, and runs the user's code once. Needs no GPU library."""

from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, Option, Overrides, UsePreflight
from rollbook.commands.output import result, stderr_console
from rollbook.run.config.run import (
    ConfigError,
    ConfigFault,
    dump_toml,
    in_order,
    load_resolved_config,
    located,
)
from rollbook.run.config.source import changed_fields, examine_source, resume_faults
from rollbook.run.directory import RunDirectory
from rollbook.run.preflight.report import print_warnings, run_preflight
from rollbook.run.resources.automatic import resolve
from rollbook.run.resources.machine import this_machine

PLAYED_SECTIONS = ("model", "tasks", "env", "rollout")
"""The pre-flight plays an episode with these. Where a setting of them is wrong, it would report its consequences."""


def check_command(
    config: Annotated[Path, Argument(help="The run's TOML file, or a run directory: its recorded configuration.")],
    override: Overrides = None,
    preflight: UsePreflight = True,
    full: Annotated[
        bool, Option("--full", help="Print every setting, not only those that differ from the default.")
    ] = False,
) -> None:
    """Report every fault of a run file, its code and this machine.

    All faults are reported at once, each with its line in the file. Without a fault, prints the settings that differ from the
    defaults, as resolved on this machine. A run directory is checked as `rollbook train RUN_DIR` would resume it, with your code
    as it is now. What this machine lacks (a GPU, the interpreter of vLLM) is a warning here, because a run may be checked on one
    machine and started on another. `rollbook train` refuses it.
    """
    overrides, console = override or (), stderr_console()
    read, examined = examine_source(config, overrides)
    faults, warnings = list(examined.faults), list[ConfigFault]()
    if examined.loaded is None:
        raise ConfigError(str(config), faults)
    recorded = None if read.run_dir is None else load_resolved_config(RunDirectory(read.run_dir)).config
    found = resolve(examined.loaded, this_machine(), recorded=recorded)
    more = found.faults(needs_machine=False)
    if recorded is not None:
        more += resume_faults(recorded, changed_fields(recorded, found.loaded.config))
    warnings += found.missing
    seconds = None
    unplayable = [path for path in sorted(examined.repairs.left_out) if path.partition(".")[0] in PLAYED_SECTIONS]
    if preflight and not unplayable:
        report = run_preflight(found.loaded)
        more += report.faults
        warnings += report.warnings
        seconds = report.seconds
    faults += [
        fault
        for fault in located(more, read.file, overrides)
        if not examined.repairs.repeats_absence(fault.path, fault.message)
        and not examined.repairs.is_consequence(fault.path, fault.message)
    ]
    print_warnings(located(warnings, read.file, overrides), console)
    if faults:
        if preflight and unplayable:
            console.print(f"not checked yet: your code, because {', '.join(unplayable)} must be corrected first")
        raise ConfigError(str(config), in_order(faults))
    if seconds is not None:
        console.print(f"pre-flight: ok ({seconds:.1f} s)", markup=False)
    result(dump_toml(found.loaded.config, masks_secrets=True, is_full=full).rstrip())
    # Last: the configuration may have hundreds of lines, and the verdict would scroll away.
    console.print(f"{config}: ok", markup=False, style="green")
    if not full:
        console.print("Only what differs from the defaults is shown; --full shows every setting.", markup=False)


COMMANDS = {"check": check_command}
