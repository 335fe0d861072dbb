"""Turn credit: each turn of an episode has its own advantage, from the rewards that came after it.

The return of a turn is the discounted sum of its reward and of those of later turns. What the rewards of the turns leave of the
sample's reward (reward functions, length penalties, or all of it if no turn has a reward) counts for the last turn, so a sample is
worth the same as with episode credit. docs/credit.md has the formulas, their sources, and when each is biased.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.advantages.credit import Credit, RewardedBatch, spread_over_tokens, trained_mean
from rollbook.trainer.advantages.episodes import CONSTANT, group_relative

Values = NDArray[np.float64]


def returns_of(sample: RolloutSample, reward: float, *, discount: float) -> Values:
    """The return of each turn."""
    found = np.zeros(max(1, len(sample.turns)), dtype=np.float64)
    if (rewards := sample.turn_rewards) is not None:
        found += rewards
    found[-1] += reward - found.sum()
    for turn in range(len(found) - 2, -1, -1):
        found[turn] += discount * found[turn + 1]
    return found


def turn_group(batch: RewardedBatch) -> Credit:
    """(G_t - mean) / std over the samples of the group that have a turn t."""

    def compare(group: PromptGroup, returns: Sequence[Values], rewards: Values) -> list[Values]:
        _require_whole(group, "turn_group")
        found = [np.zeros_like(values) for values in returns]
        for turn in range(max(map(len, returns))):
            reached = [number for number, values in enumerate(returns) if len(values) > turn]
            if len(reached) < 2:
                continue
            relative = group_relative(np.array([returns[number][turn] for number in reached]))
            for number, value in zip(reached, relative, strict=True):
                found[number][turn] = value
        return found

    return _by_turn(batch, compare)


def turn_rloo(batch: RewardedBatch) -> Credit:
    """G_t - b, where b is computed from other samples only: the mean of their returns at turn t.

    If no other sample has a turn t, b is the mean of their last returns. A baseline that holds a later turn of the same sample, as
    pooled ones do, depends on the action and biases the gradient.
    """

    def compare(group: PromptGroup, returns: Sequence[Values], rewards: Values) -> list[Values]:
        _require_whole(group, "turn_rloo")
        found = []
        for number, values in enumerate(returns):
            others = [other for at, other in enumerate(returns) if at != number]
            if not others:
                return [np.zeros_like(values)]
            last = float(np.mean([other[-1] for other in others]))
            baselines = [
                np.mean(reached) if (reached := [other[turn] for other in others if len(other) > turn]) else last
                for turn in range(len(values))
            ]
            found.append(values - np.array(baselines))
        return found

    return _by_turn(batch, compare)


def gigpo(batch: RewardedBatch) -> Credit:
    """The group-relative advantage of the episode, plus that of the return among all turns of the group in the same state."""

    def compare(group: PromptGroup, returns: Sequence[Values], rewards: Values) -> list[Values]:
        _require_whole(group, "gigpo")
        scorable = [sample for sample in group.samples if sample.is_scorable]
        episodes = group_relative(rewards) if len(rewards) > 1 else np.zeros(len(rewards))
        found = [np.full_like(values, episode) for values, episode in zip(returns, episodes, strict=True)]
        visits: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, sample in enumerate(scorable):
            if (states := sample.turn_states) is not None:
                for turn, state in enumerate(states.tolist()):
                    visits[state].append((number, turn))
            elif len(sample.turns) > 1:
                raise RunError(
                    f"trainer.advantage = 'gigpo': sample {number} of {group.id} has {len(sample.turns)} turns and no states; "
                    "the rollout function `chat` records them, others can with RolloutSample.with_turns(states=...)"
                )
        for places in visits.values():
            if len(places) < 2:
                continue
            relative = group_relative(np.array([returns[number][turn] for number, turn in places]))
            for (number, turn), value in zip(places, relative, strict=True):
                found[number][turn] += batch.settings.gigpo_weight * value
        return found

    return _by_turn(batch, compare)


def producer(batch: RewardedBatch) -> Credit:
    """The advantages that the producer of the samples computed for each token, such as those of a process reward model."""
    by_sample = np.zeros(len(batch.rewards))
    by_token: dict[tuple[int, int], NDArray[np.float32]] = {}
    for start, group, _ in batch.by_group():
        for number, sample in enumerate(group.samples):
            if not sample.is_scorable:
                continue
            rows = [row.advantages for row in sample.sequences]
            given = [values for values in rows if values is not None]
            if len(given) != len(rows):
                raise RunError(
                    f"trainer.advantage = 'producer': sample {number} of {group.id} has no token advantages; the rollout "
                    "function must set them, with TokenRow.with_columns(advantages=...)"
                )
            by_sample[start + number] = trained_mean(sample, given)
            by_token |= {(start + number, sequence): values for sequence, values in enumerate(given)}
    return Credit(by_sample, by_token)


def with_given(made: Credit, samples: Sequence[RolloutSample]) -> Credit:
    """The credit with the producer's advantages instead, of the sequences that have them."""
    by_sample, by_token = made.by_sample.copy(), dict(made.by_token)
    for number, sample in enumerate(samples):
        if not sample.is_scorable or all(row.advantages is None for row in sample.sequences):
            continue
        rows = []
        for sequence, row in enumerate(sample.sequences):
            other = by_token.get((number, sequence), np.full(len(row), by_sample[number], dtype=np.float32))
            rows.append(other if row.advantages is None else row.advantages)
            by_token[number, sequence] = rows[-1]
        by_sample[number] = trained_mean(sample, rows)
    return Credit(by_sample, by_token)


Compare = Callable[[PromptGroup, Sequence[Values], Values], list[Values]]
"""The advantage of each turn of the scorable samples of a group, from their returns and rewards."""


def _by_turn(batch: RewardedBatch, compare: Compare) -> Credit:
    by_sample = np.zeros(len(batch.rewards))
    by_token: dict[tuple[int, int], NDArray[np.float32]] = {}
    for start, group, rewards in batch.by_group():
        scorable = [number for number, sample in enumerate(group.samples) if sample.is_scorable]
        if not scorable:
            continue
        returns = [
            returns_of(group.samples[number], float(rewards[number]), discount=batch.settings.turn_discount)
            for number in scorable
        ]
        for number, values in zip(scorable, compare(group, returns, rewards[scorable]), strict=True):
            sample = group.samples[number]
            # Rounding must not look like a difference.
            by_turn = np.where(np.abs(values) < CONSTANT, 0.0, values)
            tokens = spread_over_tokens(sample, by_turn)
            by_sample[start + number] = trained_mean(sample, tokens)
            by_token |= {(start + number, sequence): row for sequence, row in enumerate(tokens)}
    return Credit(by_sample, by_token)


def _require_whole(group: PromptGroup, name: str) -> None:
    if group.baseline is not None:
        raise RunError(
            f"trainer.advantage = {name!r} compares the turns of whole groups, and {group.id} arrived in parts, with the rewards "
            "of its quorum only; use another gate.batch_policy"
        )
