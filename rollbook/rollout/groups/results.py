"""What comes of a group: its result, the times of its episodes, and the counts that the episodes share while they are played."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollbook.contracts.group import DropKind, DropReason, GroupOutcome, PromptGroup
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.groups.failures import describe_causes
from rollbook.rollout.policy import current_episode

CAUSE_CHARS = 1500
"""Causes are counted by their text and stored with the group, so long ones are cut. A traceback of user code fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTimes:
    """When an episode was played, and what came of it. For traces."""

    start: float
    """Wall clock."""
    end: float
    reward: float | None = None
    cause: str | None = None
    """Why it could not be scored."""
    turns: tuple[tuple[float, float], ...] = ()
    """Wall clock at the start and at the end of each request to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A group or a part. `group` is None if there is no sample at all. With `drop`, the group is stored as dropped."""

    outcome: GroupOutcome
    group: PromptGroup | None = None
    drop: DropReason | None = None
    episodes: tuple[EpisodeTimes, ...] = ()
    """Every episode that was played, retried ones included."""
    is_last: bool = True
    """Nothing follows. False for all parts but the last one of an attempt."""
    missing: DropReason | None = None
    """In the last part: why samples of the group are missing, if some are."""

    def __post_init__(self) -> None:
        if self.group is None and self.drop is None:
            raise ValueError("a result without a group needs a drop reason")


@dataclass(slots=True)
class GroupTally:
    """State that the episodes of one group share."""

    retries_left: int
    until: float
    wanted: int
    causes: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    declined: int = 0
    scored: int = 0
    episodes: list[EpisodeTimes] = field(default_factory=list)
    has_enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group has all its scorable samples. Episodes still run then only with over-sampling."""
    lost: int = 0
    """Episodes that ended without any sample."""
    earlier_causes: Counter[str] = field(default_factory=Counter)
    """Causes that were reported with earlier parts."""

    def begin_part(self) -> None:
        """The counts so far were reported with a part."""
        self.earlier_causes += self.causes
        self.causes, self.episodes = Counter(), []
        self.retried = self.declined = 0

    def add_scored(self) -> None:
        self.scored += 1
        if self.scored >= self.wanted:
            self.has_enough.set()

    @property
    def missing(self) -> DropReason:
        """Why the group lacks samples."""
        causes = self.earlier_causes + self.causes
        if not causes:
            return DropReason(DropKind.FILTERED, f"declined: rollout returned None for {self.lost} samples")
        return DropReason(DropKind.INVALID, f"{self.lost} samples are missing ({describe_causes(causes)})")

    def empty_outcome(self, seconds: float) -> GroupOutcome:
        """The outcome if there is no sample."""
        return GroupOutcome(
            num_samples=0,
            num_scorable=0,
            reward_mean=None,
            reward_std=None,
            solved_rate=None,
            truncated_rate=0.0,
            mean_turns=0.0,
            mean_response_tokens=0.0,
            seconds=seconds,
            invalid_causes=dict(self.causes),
            retried_samples=self.retried,
            declined_samples=self.declined,
        )


def valid_text(text: str) -> str:
    """The text with half characters escaped: an error may quote them from the policy's JSON, and they cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


def times_of(began: float, result: RolloutSample | tuple[RolloutSample | None, Exception] | None) -> EpisodeTimes:
    sample, cause = result if isinstance(result, tuple) else (result, None)
    return EpisodeTimes(
        start=began,
        end=time.time(),
        reward=None if sample is None else sample.reward,
        cause=None if cause is None else valid_text(str(cause))[:CAUSE_CHARS],
        turns=() if sample is None else tuple(_request_times(sample, began)),
    )


def _request_times(sample: RolloutSample, began: float) -> Iterator[tuple[float, float]]:
    """As recorded by the policy. A sample of another origin has durations only: its turns are placed one after the other."""
    requests = [] if (episode := current_episode()) is None else episode.times
    ends = [request.ended_at for request in requests]
    start = began
    for number, turn in enumerate(sample.turns):
        end = ends[number] if len(ends) == len(sample.turns) else None
        if end is not None:
            start = end - turn.seconds
        yield start, start + turn.seconds
        start += turn.seconds + turn.act_s
