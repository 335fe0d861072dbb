"""Before anything runs: the model directory, with initial weights and tokenizer, from which engine and trainer both start."""

import asyncio

from rollbook.run.child import RoleContext
from rollbook.run.model_location import record_model_location
from rollbook.trainer.model_directory import prepare_model_directory


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    model = config.model
    if model.path is not None and (beside := context.loaded.source_dir / model.path).is_dir():
        model = model.model_copy(update={"path": str(beside)})
    made = await asyncio.to_thread(prepare_model_directory, model, context.directory.model, seed=config.run.seed)
    record_model_location(context.directory, made)
    context.log.info("run.model_prepared", directory=str(made))
    return f"model in {made}"
