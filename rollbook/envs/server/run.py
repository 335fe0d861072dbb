"""Opens the pool, builds the application and listens.

async with serve_environments(EnvConfig(name="arithmetic"), size=8) as server:
    ...                                              # server.url accepts connections
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollbook.access.guard import AllowedClients
from rollbook.access.server import serve_app
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import RunError
from rollbook.envs.catalog import environment_class, open_environment_pool
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.environment import EnvironmentPool
from rollbook.envs.server.app import EnvironmentInfo, build_app
from rollbook.envs.server.auth import check_exposure
from rollbook.envs.server.openenv import OpenEnvPool
from rollbook.envs.server.playground import example_tasks
from rollbook.telemetry.events import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    url: str
    pool: EnvironmentPool


@asynccontextmanager
async def open_app(
    env: EnvConfig,
    server: EnvServerConfig,
    *,
    size: int | None = None,
    is_openenv: bool = False,
    tasks: Sequence[Mapping[str, Any]] | None = None,
    log: EventLog | None = None,
) -> AsyncIterator[tuple[web.Application, EnvironmentPool]]:
    """The application of `rollbook env serve` and its open pool. With `is_openenv`, `env.name` is an OpenEnv class.

    `tasks`: what the playground offers, and one of which a reset without a task gets; by default the examples of the class.
    """
    log = log or EventLog("env-server")
    if is_openenv:
        hosted = OpenEnvPool(env.name, env.args, size=size or 1)
        info = EnvironmentInfo(name=hosted.name, description=hosted.description)
        try:
            yield build_app(hosted, server, info=info, dialect=hosted.dialect, log=log), hosted
        finally:
            hosted.close()
        return
    async with open_environment_pool(env, size=size, log=log) as pool:
        kind = environment_class(env.name)
        lines = (kind.__doc__ or "").strip().splitlines()
        info = EnvironmentInfo(
            name=env.name,
            description=lines[0] if lines else env.name,
            tasks=example_tasks(kind) if tasks is None else tasks,
        )
        yield build_app(pool, server, info=info, log=log), pool


@asynccontextmanager
async def serve_environments(
    env: EnvConfig,
    server: EnvServerConfig | None = None,
    *,
    size: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    is_openenv: bool = False,
    tasks: Sequence[Mapping[str, Any]] | None = None,
    allowed: AllowedClients | None = None,
    log: EventLog | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs, from when all environments are ready. Port 0: any free port."""
    server = server or EnvServerConfig()
    check_exposure(host, server)
    async with open_app(env, server, size=size, is_openenv=is_openenv, tasks=tasks, log=log) as (app, pool):
        try:
            sock = listening_socket(host, port)
        except OSError as error:
            raise RunError(f"the environment server cannot listen on {host}:{port}: {error}") from error
        async with serve_app(app, sock, allowed=allowed) as url:
            yield RunningServer(url=url, pool=pool)
