"""`rollbook join`: serve a run that is running."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import is_address
from rollbook.cli.output import stderr_console
from rollbook.commands.training.join import JoinOptions, join_address, join_directory, member_name
from rollbook.run.members.announced_run import Place


class Role(StrEnum):
    POLICY = "policy"
    ROLLOUT = "rollout"
    ENV = "env"
    RANK = "rank"


def join(  # noqa: PLR0917 - a command line is a list of flags
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|LEDGER_URL",
            help="The run directory, if this machine sees it, or the address of the run's ledger: http://HOST:PORT.",
        ),
    ],
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
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run, if several runs of the ledger are running.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="With LEDGER_URL: file with the token of the run or of the ledger service. Default: ROLLBOOK_TRAINER_TOKENS.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            help="With LEDGER_URL: directory of your modules and task files on this machine. Default: the current directory.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="With LEDGER_URL: directory of the model on this machine. Default: model.path."),
    ] = None,
) -> None:
    """Add a policy server, a dispatcher, an environment server or a trainer rank to a run with cluster.allow_join = true.

    It leaves when the run ends or stops, and on Ctrl-C, after it has finished its work.
    """
    console = stderr_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    options = JoinOptions(role=role.value, host=host, name=name or member_name(role.value), gpus=gpus)
    if is_address(target):
        place = Place(source_dir=(source or Path()).resolve(), model=None if model is None else model.resolve())
        say(join_address(target, options, run=run, token_file=token_file, place=place, say=say))
    else:
        say(join_directory(Path(target), options, say=say))
