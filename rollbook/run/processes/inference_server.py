"""The policy process: engine, gate, server. It samples nothing before the trainer published weights to it."""

from rollbook.inference.engine import open_engine
from rollbook.inference.server import build_app
from rollbook.run.child import RoleContext
from rollbook.run.model_location import model_location
from rollbook.run.serving import serving


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    model_dir = model_location(context.directory) if config.inference.engine != "scripted" else None
    async with (
        open_engine(config.inference, model_dir, spans=context.spans) as engine,
        serving(build_app(engine, config.inference), context.listening()) as url,
    ):
        context.log.info("policy.serving", url=url, engine=config.inference.engine)
        context.channel.ready(f"serving, {config.inference.engine} engine")
        await context.draining.wait()
    return "stopped"
