"""A trainer rank on another machine than the trainer: holds its shard of the model, and trains its share of every batch."""

import asyncio
import threading
from typing import Any

from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.membership import telemetry_shipped
from rollbook.telemetry.waits import WAITS
from rollbook.trainer.distributed.links import Invitation
from rollbook.trainer.team import INVITATION, follow, join_team

POLL_S = 0.5
LEADER = "rank 0 of the trainer"


async def main(context: RoleContext) -> str:
    async with telemetry_shipped(context):
        return await _run(context)


async def _run(context: RoleContext) -> str:
    context.channel.ready("waiting for the trainer")
    stopped = asyncio.create_task(context.until_stopped(), name="rank.stop")
    try:
        while not stopped.done():
            invitation = Invitation.read(context.directory.path / INVITATION)
            if invitation is not None and await _follow(context, invitation, stopped):
                return "the trainer has stopped"
            await asyncio.wait({stopped}, timeout=POLL_S)
        return "stopped"
    finally:
        stopped.cancel()


async def _follow(context: RoleContext, invitation: Invitation, stopped: "asyncio.Task[None]") -> bool:
    """Train until the trainer stops. False if it could not be reached, or if this process is to end.

    In a daemon thread: a rank in a collective cannot be interrupted, and the end of the process ends it.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[bool] = loop.create_future()

    def finish(is_followed: bool, error: BaseException | None) -> None:
        if finished.cancelled():
            return
        if error is not None:
            finished.set_exception(error)
        else:
            finished.set_result(is_followed)

    def welcomed(rank: int) -> None:
        context.log.info("rank.joined", rank=rank, trainer=invitation.host)
        context.channel.doing(f"training as rank {rank}")

    def run() -> None:
        try:
            link = join_team(invitation)
            WAITS.recovered(LEADER)
        except OSError as error:
            WAITS.failing(LEADER, str(error))
            loop.call_soon_threadsafe(finish, False, None)
            return
        try:
            follow(link, host=context.host, on_welcome=welcomed)
        except BaseException as error:  # re-raised in the event loop
            loop.call_soon_threadsafe(finish, False, error)
        else:
            loop.call_soon_threadsafe(finish, True, None)

    threading.Thread(target=run, name="rank.follow", daemon=True).start()
    waited: set[asyncio.Future[Any]] = {finished, stopped}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    return finished.done() and finished.result()
