"""The numbers that views and plots show, and their arithmetic. No files and no drawing."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PACE_STEPS = 20
"""The pace is measured over this many recent steps, so that a slow start does not distort the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One trained step, as the trainer reported it. None: not measured."""

    step: int
    time: float
    """Unix time at which the row was written."""
    reward: float | None = None
    solved: float | None = None
    lag_max: float | None = None
    lag_mean: float | None = None
    wait_s: float = 0.0
    """Seconds the trainer waited for this batch."""
    train_s: float = 0.0
    """Seconds it trained on it."""
    step_s: float | None = None
    """Seconds of the whole step, waiting and acknowledging included."""
    samples: float = 0.0
    tokens: float = 0.0
    response_tokens: float | None = None
    """Trained tokens per sample."""
    truncated: float | None = None
    """Share of the samples that ended by a limit."""
    cut: float | None = None
    """Share of the samples that ended by a limit of tokens."""
    masked: float | None = None
    """Share of the trainable tokens that are older than the bound; `masked_first`: in the first quarter of each sample."""
    masked_first: float | None = None
    masked_first_turns: float | None = None
    """Share of the samples of several turns whose first turn is not trained."""
    entropy: float | None = None
    reference_kl: float | None = None
    """Divergence from the initial policy; measured only if the run uses it."""
    sampler_kl: float | None = None
    """Divergence from the policy that sampled the batch."""
    ratio: float | None = None
    """Mean of current / starting at the last minibatch: drift from the policy at the start of the step."""
    mismatch_weight: float | None = None
    """Mean of starting / sampled over the trained tokens."""
    ess: float | None = None
    """Effective sample size of the weights starting / sampled, as a share of the tokens. Low: the batch is far off-policy."""
    pass_tokens: float | None = None
    """Tokens that a pass may have."""
    is_checkpointing: bool = False
    failed_pass_tokens: float | None = None
    """`pass_tokens` of the first attempt of the step that did not fit into memory; None: it fitted."""
    inexact: float | None = None
    """Share of the compared tokens whose logprobs in engine and trainer have unequal bits; None: not promised."""
    unequal: str | None = None
    """The compared token whose logprobs differ most."""
    unscorable: float | None = None
    """Share of the episodes since the previous step that have no reward."""
    filtered: float | None = None
    """Share of the groups since the previous step that a filter dropped."""
    raw_solved: float | None = None
    """Solved share of the samples since the previous step, trained or not. `solved` is that of the trained ones."""
    raw_reward: float | None = None
    """Mean reward of the samples since the previous step, trained or not."""
    highest_reward: float | None = None
    """The highest reward of one of them."""

    @property
    def kl(self) -> float | None:
        return self.sampler_kl if self.reference_kl is None else self.reference_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTotals:
    """What was played so far."""

    episodes: float = 0.0
    unscorable: float = 0.0
    judged: float = 0.0
    """Samples whose environment reports whether they are solved."""
    solved: float = 0.0
    scored: float = 0.0
    reward: float = 0.0
    """Sum over the scored samples."""
    highest_reward: float | None = None
    groups: float = 0.0
    filtered: float = 0.0
    failed: float = 0.0
    """Groups with too few scorable samples."""
    worker_deaths: float = 0.0

    def plus(self, row: Mapping[str, float]) -> "RolloutTotals":
        """These totals and the values of one row of the dispatcher."""
        episodes, unscorable = row.get("rollout/episodes", 0.0), row.get("async/invalid_samples", 0.0)
        scored = max(0.0, episodes - unscorable)
        judged = scored if "rollout/raw_accuracy" in row else 0.0
        rewarded = scored if "rollout/raw_reward" in row else 0.0
        highest = [value for value in (self.highest_reward, row.get("rollout/raw_reward_max")) if value is not None]
        return RolloutTotals(
            episodes=self.episodes + episodes,
            unscorable=self.unscorable + unscorable,
            judged=self.judged + judged,
            solved=self.solved + judged * row.get("rollout/raw_accuracy", 0.0),
            scored=self.scored + rewarded,
            reward=self.reward + rewarded * row.get("rollout/raw_reward", 0.0),
            highest_reward=max(highest, default=None),
            groups=self.groups + row.get("rollout/groups_finished", 0.0),
            filtered=self.filtered + row.get("async/filter_drops", 0.0),
            failed=self.failed + row.get("rollout/groups_failed", 0.0),
            worker_deaths=self.worker_deaths + row.get("rollout/worker_deaths", 0.0),
        )

    @property
    def unscorable_share(self) -> float | None:
        return self.unscorable / self.episodes if self.episodes else None

    @property
    def solved_share(self) -> float | None:
        return self.solved / self.judged if self.judged else None

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.scored if self.scored else None

    @property
    def ended(self) -> float:
        """Groups that are finished or dropped. A group may be dropped by its first part, before its last sample is finished."""
        return max(self.groups, self.filtered + self.failed)

    @property
    def filtered_share(self) -> float | None:
        return self.filtered / self.ended if self.ended else None

    @property
    def failed_share(self) -> float | None:
        return self.failed / self.ended if self.ended else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One evaluation on held-out tasks."""

    step: int
    tasks: int
    reward: float | None = None
    solved: float | None = None
    low: float | None = None
    high: float | None = None
    """The 95 % interval of `solved`."""
    reward_low: float | None = None
    reward_high: float | None = None
    """The 95 % interval of `reward`."""

    @property
    def headline(self) -> tuple[float | None, float | None, float | None]:
        """The solve rate with its interval; the reward where it is not known whether tasks are solved."""
        if self.solved is None:
            return self.reward, self.reward_low, self.reward_high
        return self.solved, self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One played episode, as text."""

    time: float
    group_id: str
    reward: float | None
    messages: tuple[tuple[str, str], ...]
    """Role and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """A run as far as its files were read."""

    steps: tuple[StepMetrics, ...] = ()
    """The most recent steps, oldest first; the reader limits their number."""
    last_step: int = 0
    max_lag: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0
    gauges: Mapping[str, float] = field(default_factory=dict)
    """The last value of every metric of any process."""
    totals: RolloutTotals = RolloutTotals()
    evaluation: EvaluationPoint | None = None
    """The last one."""
    transcript: Transcript | None = None
    """The last one."""
    problems: tuple[str, ...] = ()
    """Why the run may have stopped learning, with the settings that help; each kind once."""

    @property
    def latest(self) -> StepMetrics:
        """The last step. Before the first step: step 0 without measurements."""
        return self.steps[-1] if self.steps else StepMetrics(step=0, time=0.0)

    @property
    def trainer_utilisation(self) -> float | None:
        return trainer_utilisation(self.wait_s, self.train_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens per second over the kept steps."""
        seconds = self.seconds_per_step
        if not seconds:
            return None
        return sum(step.tokens for step in self.steps) / len(self.steps) / seconds

    @property
    def seconds_per_step(self) -> float | None:
        recent = self.steps[-PACE_STEPS:]
        if len(recent) < 2 or recent[-1].step <= recent[0].step:
            return None
        seconds = sum(_seconds_between(*rows) for rows in itertools.pairwise(recent))
        return seconds / (recent[-1].step - recent[0].step)

    def eta_s(self, total_steps: int) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, total_steps - self.last_step)


@dataclass(frozen=True, slots=True)
class Change:
    """Means over the first and the last tenth of the steps."""

    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run."""

    steps: int
    reward: Change = Change()
    solved: Change = Change()
    response_tokens: Change = Change()
    truncated: Change = Change()
    entropy: Change = Change()
    kl: Change = Change()
    has_reference_kl: bool = False
    """`kl` is the divergence from the initial policy; otherwise that within a step."""
    max_lag: int = 0
    trainer_utilisation: float | None = None
    totals: RolloutTotals = RolloutTotals()
    evaluations: tuple[EvaluationPoint, ...] = ()
    problems: tuple[str, ...] = ()
    """See `RunMetrics.problems`."""


def trainer_utilisation(wait_s: float, train_s: float) -> float | None:
    """The fraction of time in which the trainer did not wait for a batch."""
    total_s = wait_s + train_s
    return 1.0 - wait_s / total_s if total_s > 0 else None


def _seconds_between(before: StepMetrics, step: StepMetrics) -> float:
    """From row to row, but at most the step's own time: a run that was stopped in between did not train."""
    seconds = max(0.0, step.time - before.time)
    return seconds if step.step_s is None else min(seconds, step.step_s)


def tenth_means(values: Sequence[float | None]) -> Change:
    """Means over the first and the last tenth, at least one step each, ignoring missing values."""
    tenth = max(1, round(len(values) / 10))
    return Change(_mean(values[:tenth]), _mean(values[-tenth:]))


def moving_average(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of each value and up to `width - 1` values before it, ignoring missing values."""
    return [_mean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
