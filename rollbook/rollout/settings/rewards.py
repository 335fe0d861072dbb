"""How the values of several reward functions become one reward, or the reason why there is none. Pure.

`None` and NaN mean "could not be scored". They are never 0: a sample that nobody could judge teaches nothing, and a zero would
teach that it was bad.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

TO_BE_SCORED = "to be scored by rollout.rewards"
"""The `invalid_cause` of a sample whose rollout function leaves scoring to the reward functions."""

SECONDS_KEY = "reward_seconds"
"""Metric of a sample: seconds of its slowest reward function."""


def score_key(name: str) -> str:
    """Metric of a sample and of the run: the value of one reward function; absent if it could not score."""
    return f"reward/{name}"


class Missing(StrEnum):
    UNSCORABLE = "unscorable"
    """One function that could not score makes the sample unscorable."""
    SKIP = "skip"
    """A function that gives None or NaN does not apply here: the others make the reward. Failures still make it unscorable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    name: str
    path: str
    """`module:function`."""
    weight: float = 1.0
    """0: only measured; then its failure costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRules:
    functions: tuple[RewardFunction, ...]
    environment_weight: float = 0.0
    missing: Missing = Missing.UNSCORABLE
    timeout_s: float = 10.0
    start_s: float = 60.0
    processes: int = 2
    concurrent: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one function said. Neither value nor cause: it could not score and broke nothing."""

    value: float | None = None
    cause: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward, or the cause why there is none."""

    reward: float | None
    cause: str | None = None


def combine(rules: RewardRules, scores: Mapping[str, Score], *, environment: float | None) -> Verdict:
    """The weighted sum, or why there is none. `environment` is the reward that the episode itself brought."""
    total, counted = 0.0, 0
    if rules.environment_weight:
        if environment is None:
            return Verdict(None, "the episode brought no reward of its own, and environment_weight wants one")
        total, counted = rules.environment_weight * environment, 1
    for function in rules.functions:
        if not function.weight:
            continue
        score = scores[function.name]
        if score.cause is not None:
            return Verdict(None, f"reward {function.name}: {score.cause}")
        if score.value is not None:
            total, counted = total + function.weight * score.value, counted + 1
        elif rules.missing is Missing.UNSCORABLE:
            return Verdict(None, f"reward {function.name} could not score it (None or NaN)")
    return Verdict(total) if counted else Verdict(None, "no reward function could score it (None or NaN)")
