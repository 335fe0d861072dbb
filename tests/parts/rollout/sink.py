"""A run on a real ledger, as the sink of dispatchers. It ends when all its draws are settled, or when the test ends it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from rollbook.contracts.admission import OwnerId, PartReceipt, Receipt, RunId, RunSettings
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState, PromptGroup
from rollbook.contracts.group_codec import EncodedGroup, decode_group
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.records import GroupRecord
from rollbook.ledger.service import Ledger
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.service import serving

RUN = RunId("dispatched")
PUBLICATION = PublicationId(0)
"""The weights that sample."""


class Submitted(NamedTuple):
    group: PromptGroup
    outcome: GroupOutcome


class LedgerSink:
    """Implements `GroupSink` with a client of the ledger. Weights are published, so the gate is open up to the run's limits."""

    def __init__(self, ledger: Ledger, client: LedgerClient) -> None:
        self._ledger = ledger
        self._client = client
        self._beginning = asyncio.Lock()
        self._has_begun = self._is_ended = False
        self.limit()
        self.rows: dict[GroupId, GroupRecord] = {}
        """The groups as they were when one was last settled, and before the end of the run dropped the open ones."""
        self.submitted: dict[GroupId, Submitted] = {}
        self.released: list[tuple[GroupId, int, str]] = []
        self.was_exhausted = False
        self.fail_next: list[Exception] = []
        """Raised by the next calls."""

    def limit(
        self, *, capacity: int = 8, wanted: int | None = None, deadline_s: float = 60.0, max_attempts: int = 5
    ) -> Self:
        """`capacity`: open groups. `wanted`: the run ends when this many are settled. Call it before the run has begun."""
        self._wanted = wanted
        self.max_attempts = max_attempts
        rule = FreshnessRule(groups_per_step=10_000, max_in_flight=capacity, max_head_offpolicy_versions=1)
        self._settings = RunSettings(rule=rule, group_deadline_s=deadline_s, max_attempts=max_attempts)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def join(self, owner_name: str) -> OwnerId:
        self._raise_planned()
        async with self._beginning:
            if not self._has_begun:
                await self._begin()
                self._has_begun = True
        return await self._client.join(owner_name)

    async def _begin(self) -> None:
        await self._ledger.create_run(RUN, self._settings)
        await self._client.take_role(restored_step=0)
        publication = await self._client.register(0, "weights")
        assert publication.id == PUBLICATION
        await self._client.confirm(publication)

    async def submit(self, group: EncodedGroup) -> PartReceipt:
        self._raise_planned()
        self.submitted[group.id] = Submitted(decode_group(group.payload), group.outcome)
        reply = await self._client.submit(group)
        await self._settled()
        return reply

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        receipt = await self._client.close(group_id, reason, outcome=outcome)
        await self._settled()
        return receipt

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        self.released.append((group_id, attempt, cause))
        await self._client.release(group_id, attempt=attempt, cause=cause)
        await self._settled()

    async def exhausted(self) -> None:
        self.was_exhausted = True
        await self._client.exhausted()
        await self._settled()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for a condition on the rows."""
        async with asyncio.timeout(90):
            while not is_reached():
                await asyncio.sleep(0.02)
                await self._read()

    async def expire(self, group_id: GroupId) -> None:
        """Another attempt of a group is due, as after the end of its lease."""
        await self._ledger.release(RUN, group_id, attempt=self.rows[group_id].attempt, cause="lease expired")

    async def end(self) -> None:
        """End the run, as its trainer does."""
        await self._read()
        self._is_ended = True
        await self._client.finish(EndOfRun.END_OF_DATA)

    async def _settled(self) -> None:
        if self._is_ended:
            return
        await self._read()
        states = [row.state for row in self.rows.values()]
        num_settled = sum(state is not GroupState.DISPATCHED for state in states)
        is_complete = self.was_exhausted and num_settled == len(states)
        if is_complete or (self._wanted is not None and num_settled >= self._wanted):
            await self.end()

    async def _read(self) -> None:
        if self._has_begun and not self._is_ended:
            found = await self._ledger.groups(RUN, limit=10_000)
            if not self._is_ended:
                self.rows = {record.group_id: record for record in found}

    def _raise_planned(self) -> None:
        if self.fail_next:
            raise self.fail_next.pop(0)


@asynccontextmanager
async def open_sink(directory: Path) -> AsyncIterator[LedgerSink]:
    async with (
        serving(directory / "ledger") as (url, ledger),
        open_ledger_client(url, RUN, request_s=30.0, log=EventLog("test")) as client,
    ):
        yield LedgerSink(ledger, client)
