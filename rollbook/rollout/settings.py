"""Plain values that worker code reads: built-in rollout functions, the limits of an episode, how rewards are combined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollbook.contracts.trajectory import SCORE_PREFIX, EndReason, RolloutSample

ROLLOUTS = {
    "agent": "rollbook.rollout.agents.rollout",
    "chat": "rollbook.rollout.episodes.chat",
    "remote": "rollbook.rollout.remote.client",
    "tools": "rollbook.rollout.episodes.tools",
    "verifiers": "rollbook.rollout.verifiers.rollout",
}
"""Built-in rollout functions: short name to module."""

_DOTTED_NAMES = {
    "rollbook.rollout.agents.rollout": "agent",
    "rollbook.rollout.episodes.chat": "chat",
    "rollbook.rollout.remote.client": "remote",
}
"""Names in configurations of earlier versions. They stay valid if a module moves."""

REWARDS = {
    name: f"rollbook.rollout.rewards.group_functions:{name}"
    for name in ("diversity", "pass_at_2", "pass_at_4", "pass_at_8")
}
"""Built-in reward functions, all of groups: short name to path."""

TO_BE_SCORED = "to be scored by rollout.rewards"
"""The `invalid_cause` of a sample whose rollout function leaves scoring to the reward functions."""

TO_BE_JUDGED = "to be scored with its group"
"""The `invalid_cause` of a sample that only the reward functions of groups have not scored yet. Never stored."""

COMPARED_FACT = "compared"
"""Fact of a sample that reward functions of groups scored: `TOGETHER`, or `LATE`."""
TOGETHER, LATE = "with its group", "with the quorum of its group"

THOUGHT_KEY, ANSWER_KEY = "thought_tokens", "answer_tokens"
"""Metrics of a sample: tokens that the policy sampled as thoughts, and as answers."""

SECONDS_KEY = "reward_seconds"
"""Metric of a sample: seconds of its slowest reward function."""


def score_key(name: str) -> str:
    """Metric of a sample and of the run: the value of one reward function; absent if it could not score."""
    return f"{SCORE_PREFIX}{name}"


def is_ready(sample: RolloutSample) -> bool:
    """Whether a sample is scored, or needs its group to be scored."""
    return sample.is_scorable or sample.invalid_cause == TO_BE_JUDGED


def quorum_of(samples: Sequence[RolloutSample]) -> tuple[RolloutSample, ...]:
    """The samples of a first part that reward functions of groups compare late ones with."""
    return tuple(s for s in samples if s.is_scorable and s.facts.get(COMPARED_FACT) == TOGETHER)


def rollout_name(function: str) -> str:
    """The value of `rollout.function` with the dotted name of a built-in function replaced by its short name."""
    return _DOTTED_NAMES.get(function.removesuffix(":make_rollout"), function)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Turns, tokens and seconds of one episode.

    An episode that reaches a limit keeps its reward and is marked as truncated. Discarding it would teach the policy to stall.
    """

    max_turns: int = 6
    max_total_tokens: int = 4096
    """Prompt, completions and observations of one sequence together."""
    max_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_total_tokens < 2 or not self.max_seconds > 0:
            raise ValueError(
                f"an episode needs at least one turn, two tokens and some time, got max_turns={self.max_turns}, "
                f"max_total_tokens={self.max_total_tokens}, max_seconds={self.max_seconds}"
            )

    def tokens_left(self, num_tokens: int) -> int:
        """Tokens the policy may still sample after a prompt of `num_tokens`."""
        return max(0, self.max_total_tokens - num_tokens)

    def before_turn(self, *, turns: int, num_tokens: int, seconds: float) -> EndReason | None:
        """The limit that forbids the next turn, or None. `num_tokens` is the length of its prompt."""
        if turns >= self.max_turns:
            return EndReason.MAX_TURNS
        if self.tokens_left(num_tokens) == 0:
            return EndReason.MAX_TOKENS
        if seconds >= self.max_seconds:
            return EndReason.TIME
        return None


class Missing(StrEnum):
    UNSCORABLE = "unscorable"
    """A sample that one function could not score is unscorable."""
    SKIP = "skip"
    """A function that returns None or NaN does not apply: the others make the reward. Failures still make it unscorable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """One judge. `JudgeConfig` documents the fields."""

    url: str
    model: str
    rubric: str = ""
    prompt_file: str | None = None
    api: str = "openai"
    api_key_env: str | None = None
    low: float = 0.0
    high: float = 1.0
    structured: bool = True
    temperature: float = 0.0
    max_tokens: int | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    first_wait_s: float = 1.0
    concurrent: int = 16
    requests_per_minute: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """`TeacherConfig` documents the fields."""

    url: str | None = None
    model: str | None = None
    policy: bool = False
    context: str | None = None
    context_role: str | None = None
    top_k: int = 0
    tasks: Mapping[str, str] = field(default_factory=dict)
    tokenizer_check: str = "digest"
    api_key_env: str | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    first_wait_s: float = 1.0
    concurrent: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeNote:
    """What one judge said about a sample."""

    model: str
    score: float | None
    """None: it gave none, and `text` says why. The others were enough for a vote."""
    text: str


@dataclass(slots=True, kw_only=True)
class JudgeUsage:
    """What the scores of judges cost."""

    requests: int = 0
    failed: int = 0
    """Requests without a usable answer."""
    cached: int = 0
    """Answers that were known."""
    tokens: int = 0
    cost: float = 0.0

    def add(self, answer: Any) -> None:
        """Add the tokens and the cost of an answer."""
        self.tokens += answer.tokens_in + answer.tokens_out
        self.cost += answer.cost

    def include(self, other: "JudgeUsage") -> None:
        for name in JUDGE_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


JUDGE_COUNTS = ("requests", "failed", "cached", "tokens", "cost")


def judge_key(name: str) -> str:
    """Metric of a sample and of the run: what its judges cost."""
    return f"judge/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    name: str
    path: str = ""
    """`module:function`. Empty: it has judges."""
    weight: float = 1.0
    """0: recorded only; its failures do not matter."""
    judges: tuple[JudgeSettings, ...] = ()
    vote: str = "mean"
    """How the scores of several judges are combined."""
    is_of_group: bool = False
    """It scores the samples of a group together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRules:
    functions: tuple[RewardFunction, ...]
    environment_weight: float = 0.0
    missing: Missing = Missing.UNSCORABLE
    timeout_s: float = 10.0
    start_s: float = 60.0
    processes: int = 2
    concurrent: int = 32

    @property
    def of_samples(self) -> tuple[RewardFunction, ...]:
        return tuple(function for function in self.functions if not function.is_of_group)

    @property
    def of_groups(self) -> tuple[RewardFunction, ...]:
        return tuple(function for function in self.functions if function.is_of_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of one function. Neither value nor cause: it could not score, without a failure."""

    value: float | None = None
    cause: str | None = None
    seconds: float = 0.0
    notes: tuple[JudgeNote, ...] = ()
    """What the judges said."""
    usage: JudgeUsage | None = None
    """What the judges cost."""
    turns: tuple[float, ...] | None = None
    """The value of each turn, of a function that scores turns; `value` is their sum."""
    values: tuple[float | None, ...] | None = None
    """The value of each sample, of a function that scores a group."""


@dataclass(frozen=True, slots=True)
class CombinedReward:
    """The reward, or the cause why there is none."""

    reward: float | None
    cause: str | None = None


def combine(rules: RewardRules, scores: Mapping[str, Score], *, environment: float | None) -> CombinedReward:
    """The weighted sum, or why there is none. `environment` is the reward that the episode returned. Functions of groups have no
    score before their group is complete.

    None and NaN mean "could not be scored". They are never 0, which would teach that the sample was bad.
    """
    total, counted, is_complete = 0.0, 0, True
    if rules.environment_weight:
        if environment is None:
            return CombinedReward(None, "environment_weight is set, but the episode returned no reward")
        total, counted = rules.environment_weight * environment, 1
    for function in rules.functions:
        if not function.weight:
            continue
        score = scores.get(function.name)
        if score is None:
            is_complete = False
            continue
        if score.cause is not None:
            return CombinedReward(None, f"reward {function.name}: {score.cause}")
        if score.value is not None:
            total, counted = total + function.weight * score.value, counted + 1
        elif rules.missing is Missing.UNSCORABLE:
            return CombinedReward(None, f"reward {function.name} could not score it (None or NaN)")
    if not is_complete:
        return CombinedReward(None, TO_BE_JUDGED)
    return CombinedReward(total) if counted else CombinedReward(None, "no reward function could score it (None or NaN)")


def combine_turns(
    rules: RewardRules, scores: Mapping[str, Score], *, environment: Sequence[float] | None
) -> list[float] | None:
    """The weighted sum of the rewards of each turn; None if neither the environment nor a function that counts scored turns."""
    weighted = [(rules.environment_weight, environment)]
    weighted += [(function.weight, scores[function.name].turns) for function in rules.of_samples]
    found = [[weight * value for value in turns] for weight, turns in weighted if weight and turns is not None]
    return [sum(values) for values in zip(*found, strict=True)] if found else None
