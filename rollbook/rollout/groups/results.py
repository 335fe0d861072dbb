"""What comes of a group: its played parts, the times of its episodes, and the counts that the episodes share."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from rollbook.contracts.decoding import valid_text
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.group_codec import EncodedGroup, decode_group
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


class PlayedPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="played"):
    """A played part of a group; a whole group is one part. A worker sends it to the dispatcher, which never decodes the frame."""

    order_id: GroupId
    """The id of the order; that of a later part differs."""
    encoded: EncodedGroup
    """Its payload is empty if there is no sample."""
    episodes: tuple[EpisodeTimes, ...] = ()
    """Every episode that was played, retried ones included."""
    scores: tuple[dict[str, float], ...] = ()
    """What the reward functions reported, for each sample that they scored."""
    is_last: bool = True
    """Nothing follows. False for all parts but the last one of an attempt."""
    missing: DropReason | None = None
    """In the last part: why samples of the group are missing, if some are."""
    baseline: tuple[float, ...] | None = None
    """The rewards of the quorum, if the group is played in parts."""

    def __post_init__(self) -> None:
        if not self.encoded.payload and self.drop is None:
            raise ValueError("a group without samples needs a drop reason")

    @property
    def group(self) -> PromptGroup | None:
        """The decoded group. None if there is no sample."""
        return decode_group(self.encoded.payload) if self.encoded.payload else None

    @property
    def outcome(self) -> GroupOutcome:
        return self.encoded.outcome

    @property
    def drop(self) -> DropReason | None:
        """With a reason, the group is stored as dropped."""
        return self.encoded.drop


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
    lost: int = 0
    """Episodes that ended without any sample."""
    earlier_causes: Counter[str] = field(default_factory=Counter)
    """Causes that earlier parts reported."""

    def begin_part(self) -> None:
        """Start counting anew: the counts so far were reported with a part."""
        self.earlier_causes += self.causes
        self.causes, self.episodes = Counter(), []
        self.retried = self.declined = 0

    @property
    def has_enough(self) -> bool:
        """Whether the group has all its scorable samples. Episodes still run then only with over-sampling."""
        return self.scored >= self.wanted

    @property
    def missing(self) -> DropReason:
        """Why the group lacks samples."""
        causes = self.earlier_causes + self.causes
        if not causes:
            return DropReason(DropKind.FILTERED, f"declined: rollout returned None for {self.lost} samples")
        return DropReason(DropKind.INVALID, f"{self.lost} samples are missing ({describe_causes(causes)})")

    def outcome(self, group: PromptGroup | None, *, seconds: float, surplus: int) -> GroupOutcome:
        """The outcome of the samples of a part; `group` is None if it has no sample."""
        if group is not None:
            return group.outcome(
                seconds=seconds,
                invalid_causes=self.causes,
                retried_samples=self.retried,
                declined_samples=self.declined,
                surplus_samples=surplus,
            )
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
    """The times that the policy recorded. Without them, the turns are placed one after the other by their durations."""
    requests = [] if (episode := current_episode()) is None else episode.times
    ends = [request.ended_at for request in requests]
    start = began
    for number, turn in enumerate(sample.turns):
        end = ends[number] if len(ends) == len(sample.turns) else None
        if end is not None:
            start = end - turn.seconds
        yield start, start + turn.seconds
        start += turn.seconds + turn.act_s
