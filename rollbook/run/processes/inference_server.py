"""The policy process: the engine and its HTTP server. It samples nothing before the trainer has published weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.access.server import serve_app
from rollbook.contracts.admission import MemberRole
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import SamplerExactness
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import SERVICE, build_app
from rollbook.inference.server.text import TextTokenizer
from rollbook.run.config.run import RunConfig
from rollbook.run.ledger_clients import client_token
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.membership import membership, until_unused


async def main(context: RoleContext) -> str:
    config, model_dir = context.loaded.config, context.directory.initial_model
    opened = open_engine(
        config.inference,
        model_dir,
        spans=context.spans,
        shared_base=context.shared_base,
        compare=compare_with_trainer if config.trainer.exactness == "bitwise" else None,
    )
    async with opened as engine:
        app = build_app(
            engine,
            config.inference,
            tokenizer=load_tokenizer(model_dir),
            api_key=client_token(config, context.directory),
            steering_token=context.token,
        )
        service = app[SERVICE]

        def report() -> tuple[int | None, float]:
            publication, stats = engine.publication, engine.stats()
            return None if publication is None else int(publication.id), float(stats.running + stats.queued)

        async with serve_app(app, context.listening()) as url:
            async with membership(context, MemberRole.POLICY, address=url, report=report):
                context.log.info("policy.serving", url=url, engine=config.inference.engine)
                context.channel.ready(f"serving, {config.inference.engine} engine{_about(engine.exactness, config)}")
                await context.until_stopped()
            await until_unused(context, lambda: report()[1])
            service.is_draining = True
    return "stopped"


def _about(exactness: SamplerExactness, config: RunConfig) -> str:
    """Where a trainer on a GPU could have the same bits."""
    if config.trainer.device != "cuda":
        return ""
    if exactness.inexact_because is None:
        return ", exact logprobs"
    return f"; logprobs are not exact ({exactness.inexact_because})"


def compare_with_trainer(module: Any, answers: Sequence[Any]) -> str | None:
    """Loads the trainer's passes only where an engine has something to compare."""
    found: str | None = load_on_demand("rollbook.trainer.exactness:compare_probe")(module, answers)
    return found


def load_tokenizer(model_dir: Path | None) -> TextTokenizer | None:
    """The model's tokenizer, as rollouts use it. Without one, the server accepts and returns token ids only."""
    if model_dir is None or not (model_dir / "tokenizer.json").exists():
        return None
    tokenizer: TextTokenizer = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer").from_directory(
        model_dir
    )
    return tokenizer
