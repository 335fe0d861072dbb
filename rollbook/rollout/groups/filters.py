"""Filters decide which finished groups are dropped: a filter takes a group and returns the reason to drop it, or None."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from rollbook.contracts.errors import EpisodeError, RollbookError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.config import RolloutConfig

GroupFilter: TypeAlias = Callable[[PromptGroup], str | None]

SAME_REWARD = 1e-8
"""Below this spread of rewards the advantages of a group are zero (the trainer uses the same number)."""


class FilterError(EpisodeError):
    """A user's filter failed on a group."""


def has_own_advantages(group: PromptGroup) -> bool:
    """True if a trained token of a scorable sample has an advantage besides the one from the rewards: of the producer, or of a
    teacher."""
    rows = [row for sample in group.scorable for row in sample.sequences]
    if any(row.teacher_logprobs is not None for row in rows):
        return True
    return any(row.advantages is not None and bool(row.advantages[row.loss_mask].any()) for row in rows)


def one_sample(group: PromptGroup) -> str | None:
    """Advantages are relative to the group, so a single sample has none. A part is compared with the quorum of its group."""
    compared = group.compared_rewards()
    is_alone = len(group.scorable) == 1 if compared is None else not any(compared)
    is_dropped = bool(group.scorable) and is_alone and not has_own_advantages(group)
    return "one_sample" if is_dropped else None


def constant_reward(group: PromptGroup) -> str | None:
    """All rewards are equal, and the producer set no advantages: all advantages are 0."""
    rewards = [sample.reward for sample in group.scorable if sample.reward is not None]
    compared = group.compared_rewards()
    if compared is None:
        is_constant = bool(rewards) and max(rewards) - min(rewards) < SAME_REWARD
    else:
        is_constant = all(
            abs(reward - sum(others) / len(others)) < SAME_REWARD
            for reward, others in zip(rewards, compared, strict=True)
            if others
        )
    return "constant_reward" if is_constant and not has_own_advantages(group) else None


def constant_turns(compared: str) -> GroupFilter:
    """Like `constant_reward`, if the turns are equal too: for advantages that compare turns. `compared`: `rollout.turn_credit`."""

    def check(group: PromptGroup) -> str | None:
        samples = group.scorable
        is_constant = constant_reward(group) is not None
        if is_constant and compared in ("lengths", "states"):
            is_constant = len({len(sample.turns) for sample in samples}) == 1
        if is_constant and compared == "states":
            found = [sample.turn_states for sample in samples]
            is_constant = len({None if states is None else tuple(states.tolist()) for states in found}) == 1
        return "constant_reward" if is_constant and _has_constant_returns(samples) else None

    return check


def _has_constant_returns(samples: Sequence[RolloutSample]) -> bool:
    """What is earned from each turn on is equal. A shorter episode counts with its last turn."""
    returns = np.zeros((len(samples), max(max(1, len(sample.turns)) for sample in samples)))
    for line, sample in zip(returns, samples, strict=True):
        assert sample.reward is not None
        earned = np.zeros(max(1, len(sample.turns))) if (found := sample.turn_rewards) is None else found
        line[:] = sample.reward - (earned.sum() - earned[-1])
        line[: len(earned)] = sample.reward - np.concatenate([[0.0], np.cumsum(earned)[:-1]])
    return bool((np.ptp(returns, axis=0) < SAME_REWARD).all())


def constant_scores(names: Sequence[str]) -> GroupFilter:
    """Like `constant_reward`, if the scores of these reward functions are equal too: for advantages that compare each function."""

    def check(group: PromptGroup) -> str | None:
        for name in names:
            known = [score for sample in group.scorable if (score := sample.scores.get(name)) is not None]
            if known and max(known) - min(known) >= SAME_REWARD:
                return None
        return constant_reward(group)

    return check


def load_filters(config: RolloutConfig) -> list[GroupFilter]:
    """The filters of a run in the order of their calls: the built-in ones first, then the user's.

    Groups that have one sample by design are compared over the batch, so the built-in filters do not apply.
    """
    filters: list[GroupFilter] = []
    if config.completions_per_prompt > 1:
        filters.append(one_sample)
        if config.drop_constant_reward:
            filters.append(_constant(config))
    if config.filter is not None:
        filters.append(load_own_filter(config.filter))
    return filters


def _constant(config: RolloutConfig) -> GroupFilter:
    """Drops a group if all that the run compares in it is equal."""
    checks: list[GroupFilter] = [constant_reward]
    if config.turn_credit not in (None, "off"):
        checks.append(constant_turns(config.turn_credit))
    if config.score_credit:
        checks.append(constant_scores(config.score_credit))
    return lambda group: "constant_reward" if all(check(group) is not None for check in checks) else None


def load_own_filter(path: str) -> GroupFilter:
    return _fenced(load_plugin(path, setting="rollout.filter"), path)


def _fenced(function: GroupFilter, path: str) -> GroupFilter:
    def check(group: PromptGroup) -> str | None:
        try:
            reason = function(group)
        except RollbookError:
            raise
        except Exception as error:
            raise FilterError(f"filter {path} raised {describe_error(error)}") from error
        if reason is not None and not isinstance(reason, str):
            raise FilterError(
                f"filter {path} returned a {type(reason).__name__}; it must return a reason (str) or None"
            )
        return reason

    return check
