"""`Attempt`: one grant being played, with the results that are not stored yet and what the ledger expects next. Pure."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rollbook.contracts.admission import Grant, OpenPart, PartReceipt, Receipt
from rollbook.contracts.group import GroupId, GroupOutcome, group_id, merge_outcomes
from rollbook.rollout.workers.messages import Finished


@dataclass(frozen=True, slots=True)
class Lost:
    """There will be no further result: the worker died, or the deadline passed."""

    cause: str


@dataclass(slots=True, eq=False)
class Attempt:
    grant: Grant
    started: float
    started_wall: float
    timer: asyncio.TimerHandle
    has_ended: bool = False
    """The last result is in `results`, or was reported."""
    is_abandoned: bool = False
    """Its slot was freed; results that are still being stored must not free it again."""
    results: deque[Finished | Lost] = field(default_factory=deque)
    """Results to report, in order. Bounded by the samples of the group."""
    is_queued: bool = False
    """A submitter reports its results, or will."""
    open_part: OpenPart | None = field(init=False)
    """With batch policy `parts`: the part that the ledger expects next."""
    outcome: GroupOutcome | None = field(init=False)
    """Of all stored samples of the draw, those of earlier attempts included."""
    num_parts: int = 0

    def __post_init__(self) -> None:
        self.open_part = self.grant.part
        self.outcome = None if self.grant.part is None else self.grant.part.outcome

    @property
    def key(self) -> tuple[str, int]:
        return (self.grant.group_id, self.grant.attempt)

    @property
    def draw_id(self) -> GroupId:
        """The id of the whole group."""
        return group_id(self.grant.task_id, self.grant.draw)

    @property
    def open_id(self) -> GroupId:
        """The id under which the ledger expects the next result."""
        return self.grant.group_id if self.open_part is None else self.open_part.group_id

    @property
    def units(self) -> int:
        """What it occupies: a group, or the samples of its open part."""
        return 1 if self.open_part is None else self.open_part.num_samples

    def add_outcome(self, outcome: GroupOutcome) -> None:
        self.outcome = outcome if self.outcome is None else merge_outcomes(self.outcome, outcome)
        self.num_parts += 1

    def continues(self, result: Finished, reply: PartReceipt) -> bool:
        """Whether the ledger has the parts of this attempt, and so takes its next one.

        A repeated request is answered `already_stored` although the part is that of this attempt. Then the open part has the
        baseline of this attempt and lacks exactly the samples that this attempt still plays.
        """
        if reply.receipt is Receipt.STORED or reply.next_part is None or self.open_part is None:
            return reply.receipt is Receipt.STORED or (reply.next_part is None and result.is_last)
        left = self.open_part.num_samples - result.outcome.num_samples
        return reply.next_part.baseline == result.baseline and reply.next_part.num_samples == left
