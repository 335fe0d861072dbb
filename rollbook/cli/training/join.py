"""`rollbook join`: serve a run that is running."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.output import stderr_console
from rollbook.run.commands.cluster.join import join as serve


class Role(StrEnum):
    POLICY = "policy"
    ROLLOUT = "rollout"
    ENV = "env"
    RANK = "rank"


def join(
    run: Annotated[Path, typer.Argument(help="The run directory, also on a shared file system.")],
    role: Annotated[
        Role,
        typer.Option(
            "--role", help="A policy server, a dispatcher with its workers, an environment server, or a trainer rank."
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address of this machine, on which a server listens.")
    ] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the process; one of the same name is superseded.")
    ] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="GPUs of this process, such as 0,1.")] = None,
) -> None:
    """Add a policy server, a dispatcher, an environment server or a trainer rank to a run with cluster.allow_join = true.

    It leaves when the run ends or stops, and on Ctrl-C, after it has finished its work.
    """
    console = stderr_console()
    end = serve(run, role.value, host=host, name=name, gpus=gpus, say=lambda text: console.print(text, soft_wrap=True))
    console.print(end, soft_wrap=True)
