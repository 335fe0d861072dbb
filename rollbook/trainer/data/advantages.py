"""Advantages: how much better a sample was than its siblings, or than the batch.

Groups are told apart by an explicit id, never by reshaping, so groups of different sizes mix freely. Statistics are taken over
the scorable samples alone; an unscorable one (reward NaN) has advantage 0 and moves nobody's baseline.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CONSTANT = 1e-8
"""A spread below this is rounding: every sample did equally well, and there is nothing to learn."""

Baseline = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def group_relative(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / std with the unbiased std, as in GRPO."""
    centred = rewards - rewards.mean()
    std = float(rewards.std(ddof=1))
    return centred / (std + CONSTANT) if std >= CONSTANT else np.zeros_like(rewards)


def centred_only(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean, as in Dr. GRPO: easy and hard groups keep their own scale."""
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred if float(rewards.std(ddof=1)) >= CONSTANT else np.zeros_like(rewards)


def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of the others, as in RLOO."""
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others if float(rewards.std(ddof=1)) >= CONSTANT else np.zeros_like(rewards)


def mean_relative(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / mean, as in MaxRL: the rarer success is in a group, the more one counts. For rewards of 0 and above."""
    mean = float(rewards.mean())
    is_usable = abs(mean) >= CONSTANT and float(rewards.std(ddof=1)) >= CONSTANT
    return (rewards - mean) / abs(mean) if is_usable else np.zeros_like(rewards)


BASELINES: dict[str, Baseline] = {
    "group": group_relative,
    "dr_grpo": centred_only,
    "rloo": leave_one_out,
    "maxrl": mean_relative,
    # REINFORCE++ takes its spread from the whole batch: what follows stands in `advantages`.
    "reinforce_pp": lambda rewards: rewards,
    "reinforce_pp_baseline": centred_only,
}
BY_BATCH = frozenset({"reinforce_pp", "reinforce_pp_baseline"})
"""Normalised over the scorable samples of the whole batch after the group's baseline."""


def advantages(rewards: NDArray[np.float64], group_of: NDArray[np.int64], *, kind: str) -> NDArray[np.float64]:
    """Advantage of each sample. `rewards` is NaN where a sample could not be scored; `group_of` numbers each sample's group."""
    if rewards.shape != group_of.shape:
        raise ValueError(f"{len(rewards)} rewards for {len(group_of)} group numbers: each sample needs one of each")
    baseline = BASELINES[kind]
    result = np.zeros(len(rewards), dtype=np.float64)
    is_scorable = ~np.isnan(rewards)
    for group in np.unique(group_of):
        members = np.flatnonzero((group_of == group) & is_scorable)
        # One sample alone has nothing in its group to be compared with; the batch may still have.
        if len(members) > 1 or (kind == "reinforce_pp" and len(members)):
            result[members] = baseline(rewards[members])
    if kind in BY_BATCH:
        scorable = np.flatnonzero(is_scorable)
        result[scorable] = group_relative(result[scorable]) if len(scorable) > 1 else 0.0
    return result


def overlong_penalties(
    num_trained: NDArray[np.int64], *, most: int, buffer: int, penalty: float
) -> NDArray[np.float64]:
    """What each sample's length costs: nothing up to most - buffer tokens, then rising to the whole penalty at `most` (DAPO)."""
    into_buffer = (num_trained - (most - buffer)) / buffer
    return penalty * np.clip(into_buffer, 0.0, 1.0)
