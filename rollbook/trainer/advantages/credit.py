"""What an estimator of advantages gets, and what it returns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Settings of the estimators. `ADVANTAGE_DEFAULTS` in `trainer/loss_settings.py` lists which ones each reads; others are
    rejected."""

    turn_discount: float = 1.0
    """Discount of a reward for each turn between an action and the reward."""
    gigpo_weight: float = 1.0
    """Weight of the comparison at equal states, next to that of the episodes."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function; 1 for a function that is not listed."""
    penalty_weight: float = 1.0
    """Weight of the length penalty in `gdpo`, where it is one more reward function."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardedBatch:
    """The groups of a batch with the rewards that advantages are computed from."""

    groups: tuple[PromptGroup, ...]
    rewards: NDArray[np.float64]
    """Of all samples in the order of the batch: length penalties are subtracted, NaN means unscorable."""
    settings: AdvantageSettings = AdvantageSettings()
    penalties: NDArray[np.float64] | None = None
    """The length penalties that were subtracted; None: there are none."""

    @classmethod
    def of(cls, batch: TrainingBatch, *, settings: AdvantageSettings) -> "RewardedBatch":
        rewards = [np.nan if s.reward is None else s.reward for group in batch.groups for s in group.samples]
        return cls(groups=tuple(batch.groups), rewards=np.array(rewards, dtype=np.float64), settings=settings)

    def penalized(self, penalties: NDArray[np.float64]) -> "RewardedBatch":
        """The batch with length penalties."""
        return replace(self, rewards=self.rewards - penalties, penalties=penalties)

    @property
    def samples(self) -> list[RolloutSample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Trained tokens of each sample."""
        return np.array([sample.num_trained for sample in self.samples], dtype=np.int64)

    @property
    def group_of(self) -> NDArray[np.int64]:
        """The number of each sample's group."""
        return np.repeat(np.arange(len(self.groups)), [len(group.samples) for group in self.groups])

    def by_group(self) -> Iterator[tuple[int, PromptGroup, NDArray[np.float64]]]:
        """Each group with the number of its first sample and the rewards of its samples."""
        start = 0
        for group in self.groups:
            yield start, group, self.rewards[start : start + len(group.samples)]
            start += len(group.samples)


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a batch."""

    by_sample: NDArray[np.float64]
    """In the order of the batch; 0 for unscorable samples."""
    by_token: Mapping[tuple[int, int], NDArray[np.float32]]
    """Of an estimator that distinguishes tokens, by number of the sample in the batch and of the sequence in the sample."""


def spread_over_tokens(sample: RolloutSample, by_turn: NDArray[np.float64]) -> list[NDArray[np.float32]]:
    """For each sequence, the value of its turn at every token. A sample without marked turns is one turn."""
    if not sample.turns:
        return [np.full(len(row), by_turn[0], dtype=np.float32) for row in sample.sequences]
    # Trained tokens outside of the marks belong to no known turn: they have the mean.
    found = [np.full(len(row), by_turn.mean(), dtype=np.float32) for row in sample.sequences]
    for turn, value in zip(sample.turns, by_turn, strict=True):
        found[turn.sequence][turn.start : turn.end] = value
    return found


def trained_mean(sample: RolloutSample, by_sequence: list[NDArray[np.float32]]) -> float:
    """The mean over the trained tokens of a sample."""
    trained = [values[row.loss_mask] for row, values in zip(sample.sequences, by_sequence, strict=True)]
    values = np.concatenate(trained)
    return float(values.mean()) if len(values) else 0.0
