"""Opens the pool, builds the application and listens.

async with serve_environments(EnvConfig(name="arithmetic"), size=8) as server:
    ...                                              # server.url accepts connections
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel

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


class EnvironmentApp:
    """A server of OpenEnv environments that is built and not yet started. Made by `create_app`."""

    def __init__(self, pool: OpenEnvPool, server: EnvServerConfig) -> None:
        self._pool = pool
        self._server = server

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 8000) -> AsyncIterator[RunningServer]:
        """Serve while the block runs. Port 0: any free port."""
        info = EnvironmentInfo(name=self._pool.name, description=self._pool.description)
        app = build_app(self._pool, self._server, info=info, dialect=self._pool.dialect)
        try:
            async with _listening(app, self._server, host=host, port=port, allowed=None) as url:
                yield RunningServer(url=url, pool=self._pool)
        finally:
            self._pool.close()

    def run(self, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Serve until the process is interrupted: `uvicorn.run(app, host, port)` of other servers."""

        async def serve() -> None:
            async with self.serving(host, port):
                await asyncio.Event().wait()

        with suppress(KeyboardInterrupt):
            asyncio.run(serve())


def create_app(
    env_factory: Callable[[], Any],
    action_cls: type[BaseModel],
    observation_cls: type[BaseModel],
    env_name: str | None = None,
    *,
    max_concurrent_envs: int = 1,
    server: EnvServerConfig | None = None,
) -> EnvironmentApp:
    """A server of the environments that `env_factory` makes, like `create_app` of the `openenv` package.

    `env_factory` is an OpenEnv class, or a function that returns one of its objects. `max_concurrent_envs` sessions have one each,
    and one more client is refused with 503. `create_app(…).run(port=8000)` serves.
    """
    name = env_name or str(getattr(env_factory, "__name__", "environment"))
    pool = OpenEnvPool.of_factory(env_factory, action_cls, observation_cls, name=name, size=max_concurrent_envs)
    return EnvironmentApp(pool, server or EnvServerConfig())


@asynccontextmanager
async def _listening(
    app: web.Application, server: EnvServerConfig, *, host: str, port: int, allowed: AllowedClients | None
) -> AsyncIterator[str]:
    check_exposure(host, server)
    try:
        sock = listening_socket(host, port)
    except OSError as error:
        raise RunError(
            f"the environment server cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
        ) from error
    async with serve_app(app, sock, allowed=allowed) as url:
        yield url


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
    async with (
        open_app(env, server, size=size, is_openenv=is_openenv, tasks=tasks, log=log) as (app, pool),
        _listening(app, server, host=host, port=port, allowed=allowed) as url,
    ):
        yield RunningServer(url=url, pool=pool)
