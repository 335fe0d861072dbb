"""The estimators of advantages by name, and the user's own functions.

An estimator takes the groups of a batch with their rewards and returns an advantage for each sample, or for each token.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.user_errors import describe_error
from rollbook.trainer.advantages.credit import AdvantageSettings, Credit, RewardedBatch, trained_mean
from rollbook.trainer.advantages.episodes import BASELINES, advantages, gdpo, overlong_penalties
from rollbook.trainer.advantages.turns import gigpo, producer, turn_group, turn_rloo, with_given
from rollbook.trainer.config import TrainerConfig

Estimator: TypeAlias = Callable[[RewardedBatch], Credit]
OwnAdvantage: TypeAlias = Callable[[PromptGroup, NDArray[np.float64]], Sequence[float | Sequence[ArrayLike]]]
"""A user's function: a group, and the reward of each sample (NaN: unscorable). For each sample it returns a number, or an array for
each of its sequences with one value for each token."""


def credit(batch: TrainingBatch, config: TrainerConfig) -> Credit:
    """The advantages of the batch. Length penalties apply before the baseline.

    The baseline of a group in parts holds rewards without penalties: it is the same for all parts, and the lengths of the quorum
    are not known to later ones. An estimator that was named is used as it is; the default one is replaced where the producer
    computed the advantages of a sequence.
    """
    recipe = config.recipe
    found = RewardedBatch.of(
        batch,
        settings=AdvantageSettings(
            turn_discount=1.0 if recipe.turn_discount is None else recipe.turn_discount,
            gigpo_weight=1.0 if recipe.gigpo_weight is None else recipe.gigpo_weight,
            reward_weights=config.reward_weights or {},
            penalty_weight=recipe.overlong_penalty,
        ),
    )
    if config.overlong_tokens is not None:
        found = found.penalized(
            overlong_penalties(
                found.num_tokens,
                max_tokens=config.overlong_tokens,
                buffer=recipe.overlong_buffer,
                penalty=recipe.overlong_penalty,
            )
        )
    made = advantage_named(recipe.advantage)(found)
    return with_given(made, found.samples) if config.advantage is None and recipe.advantage != "none" else made


def by_episode(batch: RewardedBatch, *, kind: str) -> Credit:
    """One advantage for all tokens of a sample."""
    return Credit(
        advantages(
            batch.rewards,
            batch.group_of,
            kind=kind,
            compared=compared_rewards(batch.groups),
            num_tokens=batch.num_tokens,
        ),
        {},
    )


def compared_rewards(groups: Sequence[PromptGroup]) -> dict[int, list[tuple[float, ...]]]:
    """The rewards that the samples of a group in parts are compared with, by number of the group in the batch."""
    found = {number: group.compared_rewards() for number, group in enumerate(groups)}
    return {number: others for number, others in found.items() if others is not None}


ADVANTAGES: dict[str, Estimator] = {
    **{kind: partial(by_episode, kind=kind) for kind in BASELINES},
    "gdpo": gdpo,
    "turn_group": turn_group,
    "turn_rloo": turn_rloo,
    "gigpo": gigpo,
    "producer": producer,
}


def advantage_named(name: str) -> Estimator:
    """A built-in estimator, or the user's own as `package.module:function`."""
    return partial(_own_credit, name=name) if ":" in name else ADVANTAGES[name]


def _own_credit(batch: RewardedBatch, *, name: str) -> Credit:
    by_sample: list[float] = []
    by_token: dict[tuple[int, int], NDArray[np.float32]] = {}
    for start, group, rewards in batch.by_group():
        samples, tokens = own_advantages(group, rewards, name=name)
        by_sample += samples
        by_token |= {(start + number, sequence): values for (number, sequence), values in tokens.items()}
    return Credit(np.array(by_sample, dtype=np.float64), by_token)


@cache
def own_advantage(name: str) -> OwnAdvantage:
    """The user's function `package.module:function`."""
    found: OwnAdvantage = load_plugin(name, setting="trainer.advantage")
    return found


def own_advantages(
    group: PromptGroup, rewards: NDArray[np.float64], *, name: str
) -> tuple[list[float], dict[tuple[int, int], NDArray[np.float32]]]:
    """The advantage of each sample of a group by a user's function, and of each token by number of sample and sequence.

    A sample with advantages by token has their mean as its own. An unscorable sample has 0. Raises `RunError`: another attempt
    would fail in the same way.
    """
    try:
        found = list(own_advantage(name)(group, rewards.copy()))
    except Exception as error:  # User code can raise anything.
        raise RunError(f"trainer.advantage = {name!r} raised {describe_error(error)}") from error
    if len(found) != len(group.samples):
        raise RunError(
            f"trainer.advantage = {name!r} returned {len(found)} values for the {len(group.samples)} samples of {group.id}"
        )
    by_sample: list[float] = []
    by_token: dict[tuple[int, int], NDArray[np.float32]] = {}
    for number, (sample, value) in enumerate(zip(group.samples, found, strict=True)):
        if not sample.is_scorable:
            by_sample.append(0.0)
            continue
        if isinstance(value, int | float | np.number):
            by_sample.append(_finite(float(value), name, group, number))
            continue
        if len(value) != len(sample.sequences):
            raise RunError(
                f"trainer.advantage = {name!r} returned {len(value)} arrays for sample {number} of {group.id}, which has "
                f"{len(sample.sequences)} sequences"
            )
        for sequence, (row, given) in enumerate(zip(sample.sequences, value, strict=True)):
            tokens = np.asarray(given, dtype=np.float32)
            if tokens.shape != (len(row),):
                raise RunError(
                    f"trainer.advantage = {name!r} returned an array of shape {tokens.shape} for sequence {sequence} of sample "
                    f"{number} of {group.id}, which has {len(row)} tokens"
                )
            by_token[number, sequence] = tokens
        rows = [by_token[number, sequence] for sequence in range(len(sample.sequences))]
        by_sample.append(_finite(trained_mean(sample, rows), name, group, number))
    return by_sample, by_token


def _finite(value: float, name: str, group: PromptGroup, number: int) -> float:
    if not math.isfinite(value):
        raise RunError(f"trainer.advantage = {name!r} returned {value} for sample {number} of {group.id}")
    return value
