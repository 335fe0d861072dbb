"""`rollbook env serve` and `env play`: an environment server without a run."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from rollbook.access.guard import AllowedClients
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.server.run import serve_environments
from rollbook.run.directory import write_json
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.dataset import load_tasks

__all__ = ["EnvConfig", "EnvServerConfig", "serve_environment"]


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
        say(f"preparing {size or 'any number of'} environments of {env.name}")
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
