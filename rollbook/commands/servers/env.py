"""`rollbook env serve` and `env play`: an environment server without a run."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from rollbook.access.guard import AllowedClients
from rollbook.access.tokens import read_or_create_token
from rollbook.commands.arguments import AllowHost, AllowOrigin, Option, Port, ReadyFile
from rollbook.commands.output import say
from rollbook.contracts.errors import RunError
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.server.run import serve_environments
from rollbook.run.directory import write_json
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.dataset import load_tasks


def serve_environment(
    env: EnvConfig,
    server: EnvServerConfig,
    *,
    size: int | None,
    host: str,
    port: int,
    is_openenv: bool,
    tasks: str | None = None,
    allowed: AllowedClients,
    ready_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 lets the kernel choose a port; the ready file then holds the address.

    `tasks`: what the playground offers, as in the setting `tasks.source`: a file, or `module:function`.
    """
    rows = None if tasks is None else [task.row for task in load_tasks(TasksConfig(source=tasks), base_dir=Path.cwd())]

    async def serve() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.set)
        say(f"preparing {size or 'any number of'} environment{'s'[: size != 1]} of {env.name}")
        async with serve_environments(
            env, server, size=size, host=host, port=port, is_openenv=is_openenv, tasks=rows, allowed=allowed
        ) as running:
            playground = f"; play it at {running.url}/web" if server.playground else ""
            say(f"serving {env.name} at {running.url}{playground}")
            if ready_file is not None:
                write_json(ready_file, {"url": running.url})
            await stopping.wait()
            say("stopping")

    asyncio.run(serve())


EnvName = Annotated[str, Option("--env", help="A built-in environment, or your own as module:Class.")]
Arguments = Annotated[str, Option("--args", help="Keyword arguments of the environment, as a JSON object.")]
Host = Annotated[str, Option("--host", help="Addresses other than loopback need --token-file.")]


def serve_command(  # noqa: PLR0917 - a command line is a list of flags
    env: EnvName = "number_guessing",
    pool_size: Annotated[
        int | None, Option("--pool-size", min=1, help="Number of environments, and of concurrent sessions.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    args: Arguments = "{}",
    openenv: Annotated[str | None, Option("--openenv", help="Host an existing OpenEnv class: module:Class.")] = None,
    tasks: Annotated[
        str | None,
        Option(
            "--tasks",
            help="Tasks for a reset without one, chosen by its seed: a file (JSONL, CSV, Parquet) or module:function.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        Option("--token-file", help="File with the token that clients must send; created if missing."),
    ] = None,
    token: Annotated[
        str | None,
        Option("--token", variable="ROLLBOOK_ENV_TOKEN", help="The token itself. Other users can see an argument."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve environments for unchanged OpenEnv clients."""
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
        say=say,
    )


def play_command(  # noqa: PLR0917 - a command line is a list of flags
    env: EnvName = "number_guessing",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    args: Arguments = "{}",
    tasks: Annotated[
        str | None,
        Option("--tasks", help="Tasks to choose from: a file (JSONL, CSV, Parquet) or module:function."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve one environment with a web page to play it by hand."""
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
        say=say,
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


COMMANDS = {"serve": serve_command, "play": play_command}
