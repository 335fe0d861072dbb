"""The process that owns the frozen base of adapters: loads it once for trainer and policy servers, and then only waits.

It computes nothing with the weights, so hardly anything can end it before the run. A request to stop is fulfilled when no process
maps the base any more: a batch system sends it to all processes at once, and the trainer then still writes a checkpoint.
"""

import asyncio

from rollbook.run.supervision.child_main import RoleContext
from rollbook.shared_weights.base import BaseOwner, NotSharedError, refuse_base
from rollbook.trainer.model.frozen_base import own_base

POLL_S = 0.1


async def main(context: RoleContext) -> str:
    file = context.directory.shared_base_file
    # Of an owner that was killed.
    file.unlink(missing_ok=True)
    owner = await asyncio.to_thread(_offer, context)
    try:
        await context.draining.wait()
        if owner is not None:
            while owner.is_mapped():  # noqa: ASYNC110  # the end of other processes has no event
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(owner.check)
    finally:
        file.unlink(missing_ok=True)
    return "stopped"


def _offer(context: RoleContext) -> BaseOwner | None:
    """None: the base cannot be shared, and each process loads its own."""
    config, file = context.loaded.config, context.directory.shared_base_file
    try:
        owner, digest = own_base(
            context.directory.initial_model, dtype=config.inference.dtype, device=config.trainer.device
        )
    except NotSharedError as error:
        refuse_base(file, str(error))
        context.log.warning("base.not_shared", cause=str(error))
        context.channel.ready(f"each process loads its own base: {error}")
        return None
    owner.offer(file, digest=digest)
    context.log.info("base.shared", num_bytes=owner.num_bytes, digest=digest)
    context.channel.ready(f"base of {owner.num_bytes / 1e9:.1f} GB, shared")
    return owner
