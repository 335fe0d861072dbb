"""From config to a listening server: environments first, then the application, then the door is opened.

async with serve_environments(EnvConfig(name="arithmetic"), size=8) as server:
    ...                                              # server.url answers now
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from rollbook.contracts.errors import RunError
from rollbook.envs.catalog import environment_class
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.environment import EnvironmentPool
from rollbook.envs.pools.environment_pool import open_environment_pool
from rollbook.envs.server.app import EnvironmentInfo, build_app
from rollbook.envs.server.auth import check_exposure
from rollbook.envs.server.openenv import OpenEnvPool
from rollbook.telemetry.events import EventLog

# Connections that wait while all others are being accepted: a storm of clients after a restart.
BACKLOG = 4096
# Requests under way when the server stops; sessions were ended before.
DRAIN_S = 2.0


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
    log: EventLog | None = None,
) -> AsyncIterator[tuple[web.Application, EnvironmentPool]]:
    """The application of `rollbook env serve` over a pool that is ready. With `is_openenv`, `env.name` is an OpenEnv class."""
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
        yield build_app(pool, server, info=described(env.name), log=log), pool


@asynccontextmanager
async def serve_environments(
    env: EnvConfig,
    server: EnvServerConfig | None = None,
    *,
    size: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    is_openenv: bool = False,
    log: EventLog | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs. Port 0 lets the kernel choose; nobody can connect before the environments are ready."""
    server = server or EnvServerConfig()
    check_exposure(host, server)
    async with open_app(env, server, size=size, is_openenv=is_openenv, log=log) as (app, pool):
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_S, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, backlog=BACKLOG)
            try:
                await site.start()
            except OSError as error:
                raise RunError(f"the environment server cannot listen on {host}:{port}: {error}") from error
            bound_host, bound_port = runner.addresses[0][:2]
            shown = f"[{bound_host}]" if ":" in bound_host else bound_host
            yield RunningServer(url=f"http://{shown}:{bound_port}", pool=pool)
        finally:
            await runner.cleanup()


def described(name: str) -> EnvironmentInfo:
    """What `/metadata` tells: the name, and the first line its author wrote about the class."""
    lines = (environment_class(name).__doc__ or "").strip().splitlines()
    return EnvironmentInfo(name=name, description=lines[0] if lines else name)
