"""The environment process: a pool of environments and its OpenEnv server, which starts once the pool is ready."""

from pydantic import SecretStr

from rollbook.access.server import serve_app
from rollbook.contracts.admission import MemberRole
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.server.run import open_app
from rollbook.run.ledger_clients import client_token
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.membership import membership, until_unused


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    env, token = config.env, client_token(config, context.directory)
    server = EnvServerConfig(token=None if token is None else SecretStr(token))
    async with (
        open_app(env, server, size=env.pool_size, log=context.log) as (app, pool),
        serve_app(app, context.listening()) as url,
    ):
        async with membership(context, MemberRole.ENV, address=url, report=lambda: (None, float(pool.health().busy))):
            context.log.info("env.serving", url=url, env=env.name, capacity=pool.capacity)
            context.channel.ready(f"serving {pool.capacity} environments of {env.name}")
            await context.until_stopped()
        await until_unused(context, lambda: pool.health().busy)
    return "stopped"
