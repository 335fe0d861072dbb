"""`rollbook debug`: plays a recorded episode again in this process, under a debugger if wanted."""

import pdb
import traceback
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.output import EXIT_FAILED, result, stderr_console
from rollbook.contracts.errors import RollbookError
from rollbook.contracts.plugin import load_on_demand


def debug(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    group: Annotated[
        str | None, typer.Argument(help="A group id; default: the first episode of the run that failed.")
    ] = None,
    *,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Of a group without a failed episode.")] = 0,
    use_pdb: Annotated[bool, typer.Option("--pdb", help="Enter the debugger where the exception was raised.")] = False,
) -> None:
    """Play a recorded episode again with the policy's recorded answers, in this process: `breakpoint()` in your code works.

    The exit code is 1 if your code raised, 0 otherwise.
    """
    # Needs the extra `rollout`, which the help of this verb must not need.
    command = load_on_demand("rollbook.commands.record.debug")
    try:
        command.debug_run(run, group=group, sample=sample, say=result)
    except command.RecordingOverError as error:
        stderr_console().print(str(error), style="green", markup=False)
    except Exception as error:
        cause = command.root_cause(error)
        if isinstance(cause, RollbookError):
            raise  # no exception of user code: the message says everything
        traceback.print_exception(cause)
        if use_pdb:
            pdb.post_mortem(cause.__traceback__)
        raise typer.Exit(EXIT_FAILED) from None
