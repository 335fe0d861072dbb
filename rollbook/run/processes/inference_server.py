"""The policy process: the engine and its HTTP server. It samples nothing before the trainer has published weights."""

from pathlib import Path

from rollbook.access.server import serve_app
from rollbook.contracts.plugin import load_on_demand
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import SERVICE, build_app
from rollbook.inference.server.text import Tokenizer
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    config, model_dir = context.loaded.config, context.directory.initial_model
    async with open_engine(config.inference, model_dir, spans=context.spans) as engine:
        app = build_app(engine, config.inference, tokenizer=load_tokenizer(model_dir), steering_token=context.token)
        async with serve_app(app, context.listening()) as url:
            context.log.info("policy.serving", url=url, engine=config.inference.engine)
            context.channel.ready(f"serving, {config.inference.engine} engine")
            await context.draining.wait()
            app[SERVICE].is_draining = True
    return "stopped"


def load_tokenizer(model_dir: Path | None) -> Tokenizer | None:
    """The model's tokenizer, as rollouts use it. Without one, the server accepts and returns token ids only."""
    if model_dir is None or not (model_dir / "tokenizer.json").exists():
        return None
    tokenizer: Tokenizer = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer").from_directory(model_dir)
    return tokenizer
