"""A process group for weights: formed with the replicas in service, formed again when they change, left at the end."""

import asyncio
from collections.abc import Sequence

from rollbook.contracts.errors import RunError
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.weights.server_api import WeightVerbs
from rollbook.inference.weights.transport import TransferWay
from rollbook.inference.wire.weights import UpdateInfo


class WeightGroup:
    """Everything in it happens at all members together: invitations with assembling, updates with sending."""

    def __init__(self, way: TransferWay, verbs: WeightVerbs) -> None:
        self._way = way
        self._verbs = verbs
        self._members: tuple[PolicyConnection, ...] = ()

    async def send(
        self, replicas: Sequence[PolicyConnection], serving: Sequence[int], info: UpdateInfo, location: str
    ) -> None:
        """Raises `TransientError` when a member is gone; then there is no group, and the next call forms one."""
        members = tuple(replicas[at] for at in serving)
        try:
            if members != self._members:
                await self._form(members)
            await _together(*(self._verbs.update(replica, info) for replica in members), self._way.send(location))
        except BaseException:
            # Also when a replica refused: what was already on its way to it would be taken for the next update.
            self._members = ()
            raise

    async def dissolve(self) -> None:
        members, self._members = self._members, ()
        await asyncio.gather(*(self._verbs.leave(replica) for replica in members), return_exceptions=True)

    async def _form(self, members: tuple[PolicyConnection, ...]) -> None:
        self._members = ()
        sizes = await asyncio.gather(*(self._verbs.world_size(replica) for replica in members))
        invitations = self._way.invitations(sizes)
        if len(invitations) != len(members):
            raise RunError(f"{len(invitations)} invitations for {len(members)} replicas")
        await _together(
            *(self._verbs.join(replica, info) for replica, info in zip(members, invitations, strict=True)),
            self._way.assemble(1 + sum(sizes)),
        )
        self._members = members


async def _together(*deeds: object) -> None:
    """All of them at once. The first failure ends the wait for the others: their peers will not come."""
    tasks = [asyncio.ensure_future(deed) for deed in deeds]  # type: ignore[call-overload]  # awaitables of several kinds
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
