"""The process group of trainer and vLLM replicas: formed before the first send, and again when the set of replicas changes."""

import asyncio
from collections.abc import Awaitable, Sequence

from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.weights.server_api import GroupServerApi
from rollbook.inference.weights.transport import GroupTransport
from rollbook.inference.wire.weights import UpdateInfo

LEAVE_S = 5.0
"""How long the end of a group waits for its members. One of them may not respond any more."""


class WeightGroup:
    """Joining and sending are collective: every member takes part at the same time."""

    def __init__(self, transport: GroupTransport, server_api: GroupServerApi) -> None:
        self._transport = transport
        self._server_api = server_api
        self._members: tuple[PolicyConnection, ...] = ()

    async def send(self, members: Sequence[PolicyConnection], info: UpdateInfo, location: str) -> None:
        """Raises `TransientError` if a member is gone. The group is then dissolved, and the next call forms a new one."""
        members = tuple(members)
        is_new = members != self._members
        try:
            if is_new:
                await self._form(members)
            updates = (self._server_api.update(replica, info) for replica in members)
            await _all_or_none(*updates, self._transport.send(location))
        except EpisodeError as error:
            self._members = ()
            if is_new:
                raise
            # A member that restarted is not in the group any more. Only a refusal by a new group is final.
            raise TransientError(f"a member refused the update, so a new weight group is formed: {error}") from error
        except BaseException:
            # Even after a refused update: data already sent to the replica would be read as the next update.
            self._members = ()
            raise

    async def dissolve(self) -> None:
        members, self._members = self._members, ()

        async def leave() -> None:
            await asyncio.gather(*map(self._server_api.leave, members), return_exceptions=True)

        await finish(leave(), within_s=LEAVE_S, name="leave the weight group")

    async def _form(self, members: tuple[PolicyConnection, ...]) -> None:
        self._members = ()
        sizes = await asyncio.gather(*(self._server_api.world_size(replica) for replica in members))
        invitations = self._transport.invitations(sizes)
        if len(invitations) != len(members):
            raise RunError(f"{len(invitations)} invitations for {len(members)} replicas")
        joins = (self._server_api.join(replica, info) for replica, info in zip(members, invitations, strict=True))
        await _all_or_none(*joins, self._transport.assemble(1 + sum(sizes)))
        self._members = members


async def _all_or_none(*operations: Awaitable[None]) -> None:
    """Run all of them concurrently. The first failure cancels the others, because their peer will not respond."""
    tasks = [asyncio.ensure_future(operation) for operation in operations]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
