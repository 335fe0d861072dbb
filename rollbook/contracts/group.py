"""The samples of one draw, their outcome, and the states of a group with the allowed moves."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

import numpy as np

from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import MAX_REWARD, EndReason, RolloutSample

GroupId = NewType("GroupId", str)


def group_id(task_id: TaskId, draw: int) -> GroupId:
    """A group is one draw of a task; its id contains both."""
    return GroupId(f"{task_id}@{draw}")


def part_id(group: GroupId, number: int) -> GroupId:
    """The id of a part of a group. The first part has the id of the group."""
    return group if number == 1 else GroupId(f"{group}/{number}")


class GroupState(StrEnum):
    DISPATCHED = "dispatched"
    QUEUED = "queued"
    BATCHED = "batched"
    TRAINED = "trained"
    DURABLE = "durable"
    DROPPED = "dropped"


MOVES: dict[GroupState, frozenset[GroupState]] = {
    GroupState.DISPATCHED: frozenset({GroupState.QUEUED, GroupState.DROPPED}),
    GroupState.QUEUED: frozenset({GroupState.BATCHED, GroupState.DROPPED}),
    GroupState.BATCHED: frozenset({GroupState.TRAINED}),
    GroupState.TRAINED: frozenset({GroupState.DURABLE}),
    GroupState.DURABLE: frozenset(),
    GroupState.DROPPED: frozenset(),
}


class DropKind(StrEnum):
    """Why a group was not trained."""

    STALE = "stale"
    FILTERED = "filtered"
    INVALID = "invalid"
    TIMEOUT = "timeout"
    ATTEMPTS = "attempts"
    SURPLUS = "surplus"
    END_OF_DATA = "end_of_data"
    END_OF_RUN = "end_of_run"
    RESET = "reset"
    LOST = "lost"
    """Its payload was lost in a power failure (possible in the relaxed durability mode)."""
    QUARANTINED = "quarantined"
    """An operator quarantined its task."""


@dataclass(frozen=True, slots=True)
class DropReason:
    """For example `invalid: 8 of 8 samples unscorable (env: connection lost)`: a kind for counters and a detail for people."""

    kind: DropKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)

    @classmethod
    def parse(cls, text: str) -> "DropReason":
        match = re.fullmatch(r"([a-z_]+)(?:: (.*))?", text, flags=re.DOTALL)
        if match is None:
            raise ValueError(f"{text!r} is not a drop reason")
        return cls(DropKind(match[1]), match[2] or "")


class SampleOutcome(NamedTuple):
    """One sample: reward, solved, trained tokens, turns, end, started at (Unix time), seconds."""

    # A tuple takes a third of the space of a map in the ledger.
    reward: float | None
    solved: bool | None
    tokens: int
    turns: int
    end: EndReason
    started_at: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, sample: RolloutSample) -> "SampleOutcome":
        start, end = sample.started_at, sample.ended_at
        return cls(
            reward=None if sample.reward is None else float(sample.reward),
            solved=sample.solved,
            tokens=sample.num_trained,
            turns=len(sample.turns),
            end=sample.finish_reason,
            started_at=None if start is None else round(start, 3),
            seconds=None if start is None or end is None else round(end - start, 3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Summary of a group for curriculum, metrics and audit. It is kept when the payload is deleted."""

    num_samples: int
    num_scorable: int
    reward_mean: float | None
    reward_std: float | None
    solved_rate: float | None
    truncated_rate: float
    mean_turns: float
    mean_response_tokens: float
    seconds: float
    """Wall seconds from the start of the group to its last sample."""
    invalid_causes: Mapping[str, int] = field(default_factory=dict)
    """Number of unscorable episodes by cause, including retried ones."""
    retried_samples: int = 0
    declined_samples: int = 0
    """Episodes for which the rollout function returned None."""
    surplus_samples: int = 0
    """Extra episodes started by over-sampling that were not needed."""
    samples: tuple[SampleOutcome, ...] = ()
    """Empty if the producer did not report them."""


def merge_outcomes(first: GroupOutcome, second: GroupOutcome) -> GroupOutcome:
    """The outcome of the samples of two parts of a group together."""
    whole, scored = first.num_samples + second.num_samples, first.num_scorable + second.num_scorable

    def mean(name: str, weight: str, total: int) -> float | None:
        known = [(getattr(o, name), getattr(o, weight)) for o in (first, second) if getattr(o, name) is not None]
        weights = sum(number for _, number in known)
        return sum(value * number for value, number in known) / weights if total and weights else None

    reward_mean = mean("reward_mean", "num_scorable", scored)
    variance = None
    if reward_mean is not None and scored > 1:
        squares = sum(
            (o.reward_std or 0.0) ** 2 * (o.num_scorable - 1) + o.num_scorable * (o.reward_mean - reward_mean) ** 2
            for o in (first, second)
            if o.reward_mean is not None
        )
        variance = squares / (scored - 1)
    samples = first.samples + second.samples if first.samples and second.samples else ()
    # Not every scored sample states whether it is solved. Without the samples, the rates are weighted by all scored ones.
    solved_rate = _solved_rate(samples) if samples else mean("solved_rate", "num_scorable", scored)
    return GroupOutcome(
        num_samples=whole,
        num_scorable=scored,
        reward_mean=reward_mean,
        reward_std=None if variance is None else variance**0.5,
        solved_rate=solved_rate,
        truncated_rate=mean("truncated_rate", "num_samples", whole) or 0.0,
        mean_turns=mean("mean_turns", "num_samples", whole) or 0.0,
        mean_response_tokens=mean("mean_response_tokens", "num_samples", whole) or 0.0,
        seconds=max(first.seconds, second.seconds),
        invalid_causes=dict(Counter(first.invalid_causes) + Counter(second.invalid_causes)),
        retried_samples=first.retried_samples + second.retried_samples,
        declined_samples=first.declined_samples + second.declined_samples,
        surplus_samples=first.surplus_samples + second.surplus_samples,
        samples=samples,
    )


def _solved_rate(samples: tuple[SampleOutcome, ...]) -> float | None:
    solved = [sample.solved for sample in samples if sample.solved is not None and sample.reward is not None]
    return sum(solved) / len(solved) if solved else None


def check_baseline(rewards: tuple[float, ...] | None) -> None:
    """Raises `ValueError` for a baseline with a value that no reward may have."""
    # `not (x <= max)` also rejects NaN.
    if rewards is not None and not all(-MAX_REWARD <= reward <= MAX_REWARD for reward in rewards):
        raise ValueError(f"the baseline {rewards} must be between -{MAX_REWARD:g} and {MAX_REWARD:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """The samples of one draw."""

    id: GroupId
    task_id: TaskId
    draw: int
    samples: tuple[RolloutSample, ...]
    part: int = 1
    """Number of this part of the draw, from 1. Above 1 only with batch policy `parts`."""
    baseline: tuple[float, ...] | None = None
    """With batch policy `parts`: the rewards of the draw's quorum, the first scorable samples of part 1 in their order.

    Advantages are computed from them in every part. None: from the rewards of `samples`.
    """

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group {self.id} has no samples")
        if self.draw < 0:
            raise ValueError(f"group {self.id} has draw {self.draw}; it must be >= 0")
        if self.part < 1:
            raise ValueError(f"group {self.id} is part {self.part}; parts count from 1")
        check_baseline(self.baseline)

    @property
    def scorable(self) -> tuple[RolloutSample, ...]:
        return tuple(sample for sample in self.samples if sample.is_scorable)

    def compared_rewards(self) -> list[tuple[float, ...]] | None:
        """For each scorable sample the rewards of the quorum that it is compared with; None if the group has no baseline.

        A member of the quorum is compared with the other members (leave-one-out), every other sample with all of them.
        """
        if self.baseline is None:
            return None
        members = len(self.baseline) if self.part == 1 else 0
        return [
            self.baseline[:number] + self.baseline[number + 1 :] if number < members else self.baseline
            for number in range(len(self.scorable))
        ]

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def has_logprobs(self) -> bool:
        return all(row.has_logprobs for sample in self.scorable for row in sample.sequences)

    def trained_publications(self) -> frozenset[int]:
        """Publications that sampled the trained tokens of the scorable samples; they determine the group's lag."""
        rows = [row for sample in self.scorable for row in sample.sequences if row.num_trained]
        return frozenset[int]().union(*(row.trained_publications() for row in rows))

    def outcome(
        self,
        *,
        seconds: float,
        invalid_causes: Mapping[str, int] | None = None,
        retried_samples: int = 0,
        declined_samples: int = 0,
        surplus_samples: int = 0,
    ) -> GroupOutcome:
        rewards = np.array([s.reward for s in self.scorable], dtype=np.float64)
        samples = tuple(map(SampleOutcome.of, self.samples))
        return GroupOutcome(
            num_samples=len(self.samples),
            num_scorable=len(rewards),
            reward_mean=float(rewards.mean()) if len(rewards) else None,
            reward_std=float(rewards.std(ddof=1)) if len(rewards) > 1 else None,
            solved_rate=_solved_rate(samples),
            truncated_rate=sum(s.finish_reason.is_truncated for s in self.samples) / len(self.samples),
            mean_turns=sum(len(s.turns) for s in self.samples) / len(self.samples),
            mean_response_tokens=sum(s.num_trained for s in self.samples) / len(self.samples),
            seconds=seconds,
            invalid_causes=dict(invalid_causes or {}),
            retried_samples=retried_samples,
            declined_samples=declined_samples,
            surplus_samples=surplus_samples,
            samples=samples,
        )
