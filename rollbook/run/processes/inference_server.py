"""The policy process: engine, gate, server. It samples nothing before the trainer published weights to it."""

from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import SERVICE, build_app
from rollbook.run.commands.serve_policy import load_tokenizer
from rollbook.run.model_location import model_location
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.sockets import serving


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    async with (
        open_engine(config.inference, model_location(context.directory), spans=context.spans) as engine,
        serving(
            app := build_app(engine, config.inference, tokenizer=load_tokenizer(model_location(context.directory))),
            context.listening(),
        ) as url,
    ):
        context.log.info("policy.serving", url=url, engine=config.inference.engine)
        context.channel.ready(f"serving, {config.inference.engine} engine")
        await context.draining.wait()
        app[SERVICE].is_draining = True
    return "stopped"
