"""Prepares the model directory with initial weights and tokenizer, before engine and trainer start from it."""

import asyncio
from contextlib import suppress
from pathlib import Path

from rollbook.contracts.plugin import load_on_demand
from rollbook.run.directory import RunDirectoryError
from rollbook.run.model_files import model_directory
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    made = await asyncio.to_thread(_model_directory, context)
    context.directory.record_model(made)
    context.log.info("run.model_prepared", directory=str(made))
    return f"model in {made}"


def _model_directory(context: RoleContext) -> Path:
    """An existing directory is used as it is, without importing torch."""
    config = context.loaded.config
    # The model of a run never changes, and it is recorded when it is complete.
    with suppress(RunDirectoryError):
        recorded = context.directory.initial_model
        if (recorded / "config.json").is_file():
            return recorded
    found = model_directory(config.model, context.loaded.source_dir)
    if found is not None and (found / "config.json").is_file():
        return found
    prepare = load_on_demand("rollbook.trainer.model.model_directory:prepare_model_directory")
    made: Path = prepare(config.model, context.directory.model, seed=config.run.seed)
    return made
