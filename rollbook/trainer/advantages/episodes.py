"""Episode credit: how much better a sample was than the rest of its group or batch. All its tokens have this advantage.

Groups are identified by an explicit id, not by reshaping, so groups of different sizes can be mixed. Statistics use scorable
samples only; an unscorable sample (reward NaN) has advantage 0 and does not affect any baseline.

A group that arrived in parts is compared with its quorum: the rewards of the samples that finished first, fixed before the others
were known. So the advantage of a sample does not depend on which siblings happen to be in the same batch. Where fast samples have
higher rewards, the quorum is better than the group, and most differences to it are negative. Their mean over the batch is
subtracted, see `centre`. For the same reason `group` divides by the spread over the batch: the rewards of fast samples differ less
than those of the group.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.trainer.advantages.credit import Credit, RewardedBatch

CONSTANT = 1e-8
"""A standard deviation below this is rounding error: all rewards are equal, so all advantages are 0."""

EPSILON = 1e-4
"""Added to standard deviations: tiny differences between rewards do not become advantages of 1."""

Baseline = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def group_relative(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / std with the unbiased std, as in GRPO."""
    centred = rewards - rewards.mean()
    std = float(rewards.std(ddof=1))
    return centred / (std + EPSILON) if std >= CONSTANT else np.zeros_like(rewards)


def whitened(values: NDArray[np.float64], num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """(v - mean) / std over tokens, as in REINFORCE++: the value of a sample counts once for each of its tokens."""
    total = int(num_tokens.sum())
    if total < 2:
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - np.dot(values, num_tokens) / total
    std = float(np.sqrt(np.dot(np.square(centred), num_tokens) / (total - 1)))
    return centred / (std + EPSILON) if std >= CONSTANT else np.zeros_like(values)


def centred_only(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean, as in Dr. GRPO: easy and hard groups keep their own scale."""
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred if float(rewards.std(ddof=1)) >= CONSTANT else np.zeros_like(rewards)


def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of the others, as in RLOO."""
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others if float(rewards.std(ddof=1)) >= CONSTANT else np.zeros_like(rewards)


def mean_relative(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / mean, as in MaxRL: rare successes get larger advantages. For non-negative rewards."""
    mean = float(rewards.mean())
    is_usable = abs(mean) >= CONSTANT and float(rewards.std(ddof=1)) >= CONSTANT
    return (rewards - mean) / abs(mean) if is_usable else np.zeros_like(rewards)


BASELINES: dict[str, Baseline] = {
    "group": group_relative,
    "dr_grpo": centred_only,
    "rloo": leave_one_out,
    "maxrl": mean_relative,
    # Rewards do not count: for distillation alone.
    "none": np.zeros_like,
    # REINFORCE++ normalises over the tokens of the whole batch, see `advantages`.
    "reinforce_pp": lambda rewards: rewards,
    "reinforce_pp_baseline": centred_only,
}
BATCH_NORMALISED = frozenset({"reinforce_pp", "reinforce_pp_baseline", "gdpo"})
"""Normalised over the tokens of the batch's scorable samples, after the group's baseline."""

PRIOR_SAMPLES = 16
"""Shrinkage of the mean that `centre` subtracts: number of zero-advantage pseudo-samples."""

QUORUM_SCALES: dict[str, Callable[[NDArray[np.float64]], float]] = {
    "group": lambda rewards: 1.0,
    "dr_grpo": lambda rewards: 1.0,
    "rloo": lambda rewards: 1.0,
    "maxrl": lambda rewards: abs(float(rewards.mean())),
    "reinforce_pp_baseline": lambda rewards: 1.0,
}
"""What a difference to the quorum's mean is divided by. Computed from the quorum's rewards and the sample's own, so that a late
sample that differs from a constant quorum has a finite advantage. `group` divides by the spread over the batch, see `advantages`.
`reinforce_pp` has no group baseline and no entry."""


def against_quorum(
    rewards: NDArray[np.float64], compared: Sequence[Sequence[float]], *, kind: str
) -> NDArray[np.float64]:
    """(r - mean) / scale for each sample of a part, with the mean of the rewards that the sample is compared with."""
    result = np.zeros_like(rewards)
    for number, (reward, others) in enumerate(zip(rewards.tolist(), compared, strict=True)):
        if len(others) == 0:
            continue
        together = np.array([*others, reward], dtype=np.float64)
        scale = QUORUM_SCALES[kind](together)
        if _differ(together) and scale >= CONSTANT:
            result[number] = (reward - np.add.reduce(together[:-1]) / len(others)) / scale
    return result


def _differ(rewards: NDArray[np.float64]) -> bool:
    """True if rewards differ by more than rounding."""
    # The standard deviation of n values is at least their range over sqrt(2 (n - 1)), and the range takes a third of the time.
    spread = np.maximum.reduce(rewards) - np.minimum.reduce(rewards)
    return spread >= 2 * len(rewards) * CONSTANT or float(rewards.std(ddof=1)) >= CONSTANT


def centre(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Subtract the mean of the values that are not 0 from them. Values of 0 carry no signal and stay 0."""
    differs = values != 0
    shift = values[differs].sum() / (differs.sum() + PRIOR_SAMPLES)
    return np.where(differs, values - shift, 0.0)


def unit_spread(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide by the root mean square of the values that are not 0."""
    differs = values != 0
    spread = float(np.sqrt(np.square(values[differs]).mean())) if differs.any() else 0.0
    return values / (spread + EPSILON) if spread >= CONSTANT else np.zeros_like(values)


def advantages(
    rewards: NDArray[np.float64],
    group_of: NDArray[np.int64],
    *,
    kind: str,
    compared: Mapping[int, Sequence[Sequence[float]]] | None = None,
    num_tokens: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Advantage of each sample. `rewards` is NaN where a sample could not be scored; `group_of` numbers each sample's group.

    `compared`: for groups that arrived in parts, `PromptGroup.compared_rewards` by number of the group. `num_tokens`: trained
    tokens of each sample, for the kinds that normalise over the batch; None: equally many.
    """
    if rewards.shape != group_of.shape:
        raise ValueError(f"{len(rewards)} rewards, but {len(group_of)} group numbers: each sample needs one of each")
    baseline = BASELINES[kind]
    result = np.zeros(len(rewards), dtype=np.float64)
    is_scorable = ~np.isnan(rewards)
    for group in np.unique(group_of):
        members = np.flatnonzero((group_of == group) & is_scorable)
        others = (compared or {}).get(int(group))
        if others is not None and kind in QUORUM_SCALES:
            result[members] = against_quorum(rewards[members], others, kind=kind)
            continue
        # A single sample has no group baseline. The batch may still have one.
        if len(members) > 1 or (kind == "reinforce_pp" and len(members)):
            result[members] = baseline(rewards[members])
    in_parts = np.isin(group_of, [*(compared or {})])
    if kind in QUORUM_SCALES:
        result[in_parts] = centre(result[in_parts])
    if kind == "group":
        result[in_parts] = unit_spread(result[in_parts])
    if kind in BATCH_NORMALISED:
        scorable = np.flatnonzero(is_scorable)
        counts = np.ones(len(scorable), dtype=np.int64) if num_tokens is None else num_tokens[scorable]
        result[scorable] = whitened(result[scorable], counts) if len(scorable) > 1 else 0.0
    return result


def overlong_penalties(
    num_trained: NDArray[np.int64], *, max_tokens: int, buffer: int, penalty: float
) -> NDArray[np.float64]:
    """Length penalty of each sample (DAPO): 0 up to max_tokens - buffer, then rising linearly to `penalty` at max_tokens."""
    buffer_fraction = (num_trained - (max_tokens - buffer)) / buffer
    return penalty * np.clip(buffer_fraction, 0.0, 1.0)


def gdpo(batch: RewardedBatch) -> Credit:
    """Each reward function is normalised over its group alone; the weighted sum is normalised over the batch.

    A sum of rewards loses what the functions say apart: samples with scores (1, 0) and (0, 1) look equal. A function that did not
    score a sample adds nothing to it. The length penalty is one more function. A group without scores of functions is normalised by
    its reward, penalties included.
    """
    total = np.zeros(len(batch.rewards))
    for start, group, rewards in batch.by_group():
        if group.baseline is not None:
            raise RunError(
                f"trainer.advantage = 'gdpo' normalises whole groups, and {group.id} arrived in parts; "
                "use another gate.batch_policy"
            )
        scorable = np.flatnonzero(~np.isnan(rewards))
        scores = [group.samples[number].scores for number in scorable]
        names = sorted({name for score in scores for name in score})
        weights = {name: batch.settings.reward_weights.get(name, 1.0) for name in names}
        columns = [(weights[name], [score.get(name, np.nan) for score in scores]) for name in names if weights[name]]
        if columns and batch.penalties is not None:
            columns.append((batch.settings.penalty_weight, (-batch.penalties[start + scorable]).tolist()))
        for weight, column in columns or [(1.0, rewards[scorable].tolist())]:
            values = np.array(column, dtype=np.float64)
            known = np.flatnonzero(~np.isnan(values))
            if len(known) > 1:
                total[start + scorable[known]] += weight * group_relative(values[known])
    scored = np.flatnonzero(~np.isnan(batch.rewards))
    if len(scored) > 1:
        total[scored] = whitened(total[scored], np.ones(len(scored), dtype=np.int64))
    return Credit(total, {})
