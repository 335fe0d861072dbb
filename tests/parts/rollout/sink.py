"""A `GroupSink` in memory: grants, attempts, receipts, end of data."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollbook.contracts.admission import (
    DrawProgress,
    GateState,
    Grant,
    LedgerStatus,
    OpenReply,
    OwnerId,
    PartReceipt,
    PastDraw,
    Receipt,
    RunId,
)
from rollbook.contracts.freshness import GateCounts
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState, PromptGroup, group_id
from rollbook.contracts.group_codec import EncodedGroup, decode_group
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import Draw


@dataclass
class Row:
    draw: Draw
    sequence: int
    owner: OwnerId
    attempt: int = 1
    state: str = "leased"
    group: PromptGroup | None = None
    outcome: GroupOutcome | None = None
    drop: str | None = None


@dataclass
class MemorySink:
    capacity: int
    """Maximum number of leased groups."""
    wanted: int | None = None
    """The run ends when this many groups are settled."""
    deadline_s: float = 60.0
    max_attempts: int = 5
    rows: dict[GroupId, Row] = field(default_factory=dict)
    released: list[tuple[GroupId, int, str]] = field(default_factory=list)
    beats: int = 0
    was_exhausted: bool = False
    fail_next: list[Exception] = field(default_factory=list)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _joined: int = 0

    async def join(self, owner_name: str) -> OwnerId:
        self._trip()
        self._joined += 1
        for row in self.rows.values():
            if row.state == "leased" and row.owner.startswith(f"{owner_name}#"):
                row.state = "waiting"
        return OwnerId(f"{owner_name}#{self._joined}")

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        self._trip()
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        async with self._moved:
            while not (self.is_ended or self._grantable(draws)) and loop.time() < until:
                try:
                    async with asyncio.timeout(until - loop.time()):
                        await self._moved.wait()
                except TimeoutError:
                    break
            reply = self._grant(owner, draws, limit)
            self._moved.notify_all()
            return reply

    def _grantable(self, draws: Sequence[Draw]) -> bool:
        has_waiting = any(row.state == "waiting" for row in self.rows.values())
        has_known = any(group_id(draw.task_id, draw.number) in self.rows for draw in draws)
        return has_known or ((bool(draws) or has_waiting) and self._leased() < self.capacity)

    def _grant(self, owner: OwnerId, draws: Sequence[Draw], limit: int) -> OpenReply:
        grants: list[Grant] = []
        taken = 0
        if not self.is_ended:
            room = min(limit, self.capacity - self._leased())
            for row in [row for row in self.rows.values() if row.state == "waiting"][:room]:
                row.state, row.attempt, row.owner = "leased", row.attempt + 1, owner
                grants.append(self._granted(row))
            for draw in draws:
                gid = group_id(draw.task_id, draw.number)
                if gid not in self.rows:
                    if len(grants) >= room:
                        break
                    self.rows[gid] = Row(draw, sequence=len(self.rows), owner=owner)
                    grants.append(self._granted(self.rows[gid]))
                taken += 1
        return OpenReply(grants=tuple(grants), taken=taken, gate=self.gate, capacity=self.capacity - self._leased())

    def _granted(self, row: Row) -> Grant:
        return Grant(
            group_id=group_id(row.draw.task_id, row.draw.number),
            task_id=row.draw.task_id,
            draw=row.draw.number,
            position=row.draw.position,
            attempt=row.attempt,
            sequence=row.sequence,
            admission_version=0,
            admission_publication=PublicationId(3),
            deadline_s=self.deadline_s,
        )

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for a condition on the rows."""
        async with self._moved:
            await self._moved.wait_for(is_reached)

    async def expire(self, group_id: GroupId) -> None:
        """Expire the lease of a group."""
        async with self._moved:
            self.rows[group_id].state = "waiting"
            self._moved.notify_all()

    async def end(self) -> None:
        """End the run."""
        async with self._moved:
            self.wanted = 0
            self._moved.notify_all()

    async def heartbeat(self, owner: OwnerId) -> None:
        self.beats += 1

    async def submit(
        self, group: EncodedGroup, outcome: GroupOutcome, *, attempt: int, drop: DropReason | None = None
    ) -> Receipt:
        self._trip()
        state = "queued" if drop is None else "dropped"
        return await self._settle(group.id, state, decode_group(group.payload), outcome, drop)

    async def submit_part(
        self, part: EncodedGroup, outcome: GroupOutcome, *, attempt: int, drop: DropReason | None = None
    ) -> PartReceipt:
        return PartReceipt(receipt=await self.submit(part, outcome, attempt=attempt, drop=drop))

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        self._trip()
        return await self._settle(group_id, "dropped", None, outcome, reason)

    async def _settle(
        self,
        gid: GroupId,
        state: str,
        group: PromptGroup | None,
        outcome: GroupOutcome | None,
        drop: DropReason | None,
    ) -> Receipt:
        async with self._moved:
            row = self.rows[gid]
            if row.state in ("queued", "dropped"):
                return Receipt.ALREADY_STORED if row.state == "queued" else Receipt.ALREADY_SETTLED
            row.state, row.group, row.outcome, row.drop = state, group, outcome, None if drop is None else str(drop)
            self._moved.notify_all()
        return Receipt.STORED

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        self._trip()
        self.released.append((group_id, attempt, cause))
        async with self._moved:
            row = self.rows[group_id]
            if row.state == "leased" and row.attempt == attempt:
                row.state = "waiting" if row.attempt < self.max_attempts else "dropped"
                row.drop = None if row.state == "waiting" else f"attempts: {cause}"
            self._moved.notify_all()

    async def exhausted(self) -> None:
        async with self._moved:
            self.was_exhausted = True
            self._moved.notify_all()

    async def progress(self) -> DrawProgress:
        opened = {row.draw.position for row in self.rows.values()}
        settled = {row.draw.position for row in self.rows.values() if row.state == "dropped"}
        opened_below = next(p for p in range(len(opened) + 1) if p not in opened)
        settled_below = next(p for p in range(len(settled) + 1) if p not in settled)
        return DrawProgress(
            opened_below=opened_below,
            opened_beyond=tuple(p for p in sorted(opened) if p >= opened_below),
            settled_below=settled_below,
            settled_beyond=tuple(p for p in sorted(settled) if p >= settled_below),
            exhausted=self.was_exhausted,
        )

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        past = [
            PastDraw(
                group_id=gid,
                task_id=row.draw.task_id,
                number=row.draw.number,
                position=row.draw.position,
                sequence=row.sequence,
                state=GroupState(row.state) if row.state in ("queued", "dropped") else GroupState.DISPATCHED,
                outcome=row.outcome,
            )
            for gid, row in self.rows.items()
            if row.sequence > after
        ]
        return sorted(past, key=lambda draw: draw.sequence)[:limit]

    async def status(self) -> LedgerStatus:
        counts = GateCounts(leased=self._leased(), queued=sum(row.state == "queued" for row in self.rows.values()))
        return LedgerStatus(
            run_id=RunId("test"),
            gate=self.gate,
            capacity=self.capacity - self._leased(),
            counts=counts,
            opened=len(self.rows),
            version=0,
            ended=self.is_ended,
        )

    @property
    def gate(self) -> GateState:
        if self.is_ended:
            return GateState.ENDED
        return GateState.OPEN if self._leased() < self.capacity else GateState.FULL

    @property
    def is_ended(self) -> bool:
        settled = sum(row.state in ("queued", "dropped") for row in self.rows.values())
        return (self.wanted is not None and settled >= self.wanted) or (
            self.was_exhausted and settled == len(self.rows)
        )

    def _leased(self) -> int:
        return sum(row.state == "leased" for row in self.rows.values())

    def _trip(self) -> None:
        if self.fail_next:
            raise self.fail_next.pop(0)
