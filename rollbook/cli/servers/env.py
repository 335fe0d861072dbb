"""`rollbook env serve` and `rollbook env play`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rollbook.access.guard import AllowedClients
from rollbook.access.tokens import read_or_create_token
from rollbook.cli.arguments import AllowHost, AllowOrigin, verb_group
from rollbook.cli.output import stderr_console
from rollbook.commands.servers.env import EnvConfig, EnvServerConfig, serve_environment
from rollbook.contracts.errors import RunError

env_app = verb_group()

EnvName = Annotated[str, typer.Option("--env", help="A built-in environment, or your own as module:Class.")]
Arguments = Annotated[str, typer.Option("--args", help="Keyword arguments of the environment, as a JSON object.")]
Host = Annotated[str, typer.Option("--host", help="Addresses other than loopback need --token-file.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose a port.")]
ReadyFile = Annotated[
    Path | None, typer.Option("--ready-file", help="Written with the address once the server is ready.")
]


@env_app.command()
def serve(  # noqa: PLR0917 - a command line is a list of flags
    env: EnvName = "number_guessing",
    pool_size: Annotated[
        int | None, typer.Option("--pool-size", min=1, help="Number of environments, and of concurrent sessions.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    args: Arguments = "{}",
    openenv: Annotated[
        str | None, typer.Option("--openenv", help="Host an existing OpenEnv class: module:Class.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Tasks for a reset without one, chosen by its seed: a file (JSONL, CSV, Parquet) or module:function.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token that clients must send; created if missing."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="ROLLBOOK_ENV_TOKEN", help="The token itself. Other users can see an argument."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve environments for unchanged OpenEnv clients."""
    console = stderr_console()
    serve_environment(
        _config(openenv or env, args),
        EnvServerConfig.model_validate({} if (found := _token(token, token_file)) is None else {"token": found}),
        size=pool_size,
        host=host,
        port=port,
        is_openenv=openenv is not None,
        tasks=tasks,
        allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
        ready_file=ready_file,
        say=lambda text: console.print(text, markup=False),
    )


@env_app.command()
def play(  # noqa: PLR0917 - a command line is a list of flags
    env: EnvName = "number_guessing",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    args: Arguments = "{}",
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="Tasks to choose from: a file (JSONL, CSV, Parquet) or module:function."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve one environment with a web page to play it by hand."""
    console = stderr_console()
    serve_environment(
        _config(env, args),
        EnvServerConfig(playground=True),
        size=1,
        host=host,
        port=port,
        is_openenv=False,
        tasks=tasks,
        allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
        ready_file=ready_file,
        say=lambda text: console.print(text, markup=False),
    )


def _token(token: str | None, token_file: Path | None) -> str | None:
    if token_file is None:
        return token
    if token is not None:
        raise RunError("--token and --token-file are both set; use one of them")
    return read_or_create_token(token_file)


def _config(name: str, args: str) -> EnvConfig:
    try:
        table = json.loads(args)
    except json.JSONDecodeError as error:
        raise RunError(f"--args must be a JSON object, such as '{{\"max_turns\": 4}}': {error}") from error
    if not isinstance(table, dict):
        raise RunError(f"--args must be a JSON object, not {type(table).__name__}")
    return EnvConfig(name=name, args=table)
