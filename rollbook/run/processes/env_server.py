"""The environment process: a pool of environments and its OpenEnv server, which starts once the pool is ready."""

from rollbook.access.server import serve_app
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.server.run import open_app
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    env = context.loaded.config.env
    async with (
        open_app(env, EnvServerConfig(), size=env.pool_size, log=context.log) as (app, pool),
        serve_app(app, context.listening()) as url,
    ):
        context.log.info("env.serving", url=url, env=env.name, capacity=pool.capacity)
        context.channel.ready(f"serving {pool.capacity} environments of {env.name}")
        await context.draining.wait()
    return "stopped"
