"""Prepares the model directory with initial weights and tokenizer, before engine and trainer start from it. Creates the run in an
external ledger."""

import asyncio
from pathlib import Path

from rollbook.contracts.plugin import load_on_demand
from rollbook.run.directory import existing_model
from rollbook.run.ledger_clients import open_run_ledger, run_settings
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    made = await asyncio.to_thread(_model_directory, context)
    context.directory.record_model(made)
    context.log.info("run.model_prepared", directory=str(made))
    config = context.loaded.config
    if config.ledger.url is not None and not context.is_member:
        context.channel.doing(f"creating the run in the ledger at {config.ledger.url}")
        async with open_run_ledger(
            context.loaded, context.directory, config.ledger.url, log=context.log, is_trainer=True
        ) as ledger:
            await ledger.create_run(run_settings(config, context.directory))
    return f"model in {made}"


def _model_directory(context: RoleContext) -> Path:
    """An existing directory is used as it is, without importing torch."""
    config = context.loaded.config
    found = existing_model(config.model, context.directory, context.loaded.source_dir)
    if found is not None:
        return found
    prepare = load_on_demand("rollbook.trainer.model.model_directory:prepare_model_directory")
    made: Path = prepare(config.model, context.directory.model, seed=config.run.seed)
    return made
