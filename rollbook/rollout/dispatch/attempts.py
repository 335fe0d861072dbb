"""`Attempt`: one grant being played, with the results that are not stored yet and what the ledger expects next. Pure."""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import msgspec

from rollbook.contracts.admission import Grant, OpenPart, PartReceipt, Receipt
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, group_id, merge_outcomes
from rollbook.rollout.groups.results import PlayedPart


@dataclass(frozen=True, slots=True)
class Lost:
    """No more results will come: the worker died, or the deadline passed."""

    cause: str


class AfterPart(Enum):
    """What the dispatcher does after the ledger's reply to a part."""

    CONTINUE = auto()
    """The ledger expects the next part of this attempt."""
    FINISH = auto()
    """The group lacks no sample."""
    CLOSE = auto()
    """This attempt has no more samples, and the group lacks some: close its open part."""
    GIVE_UP = auto()
    """Another attempt has stored other samples."""


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
    results: deque[PlayedPart | Lost] = field(default_factory=deque)
    """Results to report, in order. Bounded by the samples of the group."""
    is_queued: bool = False
    """Queued for, or held by, a submitter."""
    open_part: OpenPart = field(init=False)
    """The part that the ledger expects next."""
    outcome: GroupOutcome | None = field(init=False)
    """The merged outcome of all stored samples of the draw, those of earlier attempts included."""
    num_parts: int = 0

    def __post_init__(self) -> None:
        self.open_part = self.grant.part
        self.outcome = self.grant.part.outcome

    @property
    def key(self) -> tuple[str, int]:
        return (self.grant.group_id, self.grant.attempt)

    @property
    def draw_id(self) -> GroupId:
        """The id of the whole group."""
        return group_id(self.grant.task_id, self.grant.draw)

    @property
    def units(self) -> int:
        """Slots this attempt occupies, in the units of the gate."""
        return self.open_part.units

    def add(self, result: PlayedPart | Lost) -> bool:
        """Whether the attempt must be queued for a submitter. A result after the last one is ignored."""
        if self.has_ended:
            return False
        if isinstance(result, Lost) or result.is_last:
            self.end()
        self.results.append(result)
        is_new, self.is_queued = not self.is_queued, True
        return is_new

    def add_outcome(self, outcome: GroupOutcome) -> None:
        self.outcome = outcome if self.outcome is None else merge_outcomes(self.outcome, outcome)
        self.num_parts += 1

    def end(self) -> None:
        """Accept no more results."""
        self.has_ended = True
        self.timer.cancel()

    def abandon(self) -> None:
        """Accept no more results, and report none of those that wait."""
        self.end()
        self.is_abandoned = True
        self.results.clear()

    def after(self, played: PlayedPart, reply: PartReceipt) -> AfterPart:
        """What follows the reply to `played`."""
        following = reply.next_part
        if following is None:
            is_stored = reply.receipt is Receipt.STORED or played.is_last
            return AfterPart.FINISH if is_stored else AfterPart.GIVE_UP
        if reply.receipt is not Receipt.STORED and not self._is_mine(following, played):
            return AfterPart.GIVE_UP
        return AfterPart.CLOSE if played.is_last else AfterPart.CONTINUE

    def _is_mine(self, following: OpenPart, played: PlayedPart) -> bool:
        """Whether the stored part is that of this attempt, although the reply to a repeated request is `already_stored`.

        Then the open part has the baseline of this attempt and lacks exactly the samples that this attempt still plays.
        """
        left = self.open_part.units - played.outcome.num_samples
        return following.baseline == played.baseline and following.units == left


def refused(played: PlayedPart, cause: str) -> PlayedPart:
    """A group that the ledger refused, as a failure: a run whose groups are all refused stops with the cause."""
    outcome = replace(played.outcome, invalid_causes={**played.outcome.invalid_causes, cause: 1})
    failed = msgspec.structs.replace(
        played.encoded, payload=b"", digest="", drop=DropReason(DropKind.INVALID, cause), outcome=outcome
    )
    return msgspec.structs.replace(played, encoded=failed, is_last=True)
