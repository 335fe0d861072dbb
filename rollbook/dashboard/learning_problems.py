"""Recognises a run that stops learning or lacks memory, from the metrics of its steps, and names the settings that help.

Means over `WINDOW` steps are compared with the first steps of the run. Each kind of problem is reported once, at the first step
where it is seen. No clock and no files.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollbook.dashboard.run_metrics import RolloutTotals, StepMetrics

WINDOW = 10
"""Steps of a mean. Shorter means of small batches are too noisy, longer ones report too late."""
SOLVED_SHARE = 0.9
"""From this solve rate on, low entropy is a success, and equal rewards mean that little is left to learn."""
NEAR_BEST = 0.05
"""Where it is not known whether samples are solved: a mean reward whose distance to the highest reward of any sample is this share
of the distance at the start is as good as solved."""
COLLAPSED_ENTROPY = 0.05
"""Share of the entropy at the start. Runs that learn well often end at a tenth (docs/results/staleness.md)."""
FILTERED_SHARE = 0.9
FEW_GROUPS = 20
"""A run that has no step yet is reported after this many groups. Groups of slow agents take minutes each."""
MAX_RATIO = 2.0
MIN_ESS = 0.2
LONGER = 3.0
TRUNCATED_SHARE = 0.5
CUT_SHARE = 0.2
MASKED_SHARE = 0.05
"""Of the sampled tokens, or of the first turns."""
TOO_HARD = (
    'Too hard: warm-start with `rollbook sft`, set tasks.order = "curriculum", or raise rollout.completions_per_prompt. '
    "Too easy: add harder tasks"
)
FALLEN_SHARE, FALLEN_BY = 0.5, 0.1
"""The reward fell to this share of its best mean, and by at least this much."""


class ProblemKind(StrEnum):
    FILTERED = "filtered groups"
    ENTROPY = "entropy collapse"
    VARIANCE = "equal rewards"
    RATIO = "exploding ratio"
    LENGTH = "length explosion"
    CUT = "cut answers"
    MASKED = "masked tokens"
    REWARD = "falling reward"
    MEMORY = "out of memory"
    EXACTNESS = "unequal logprobs"


@dataclass(frozen=True, slots=True)
class LearningProblem:
    kind: ProblemKind
    step: int
    """The first step at which it was seen."""
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.seen}. {self.advice}"


class LearningMonitor:
    """Add every step once, in order."""

    def __init__(self) -> None:
        self._first: list[StepMetrics] = []
        self._recent: deque[StepMetrics] = deque(maxlen=WINDOW)
        self._best_reward: float | None = None
        self._highest_reward: float | None = None
        """Of one sample, so far."""
        self._problems: dict[ProblemKind, LearningProblem] = {}

    @property
    def problems(self) -> tuple[LearningProblem, ...]:
        """In the order in which they were seen."""
        return tuple(self._problems.values())

    def add(self, step: StepMetrics) -> None:
        if len(self._first) < WINDOW:
            self._first.append(step)
        self._recent.append(step)
        if ProblemKind.MEMORY not in self._problems and (found := _memory(step)) is not None:
            self._problems[ProblemKind.MEMORY] = LearningProblem(ProblemKind.MEMORY, step.step, *found)
        if step.inexact and ProblemKind.EXACTNESS not in self._problems:
            seen = f"{step.inexact:.2%} of the compared tokens have other logprobs in the trainer than in the engine"
            seen += "" if step.unequal is None else f", most of all {step.unequal}"
            advice = "They should have the same bits. Train on: the loss corrects small differences; please report it with this run"
            self._problems[ProblemKind.EXACTNESS] = LearningProblem(ProblemKind.EXACTNESS, step.step, seen, advice)
        if step.highest_reward is not None:
            highest = self._highest_reward
            self._highest_reward = step.highest_reward if highest is None else max(highest, step.highest_reward)
        if len(self._recent) < WINDOW:
            return
        rules: tuple[tuple[ProblemKind, Callable[[], tuple[str, str] | None]], ...] = (
            (ProblemKind.ENTROPY, self._entropy),
            (ProblemKind.VARIANCE, self._variance),
            (ProblemKind.RATIO, self._ratio),
            (ProblemKind.LENGTH, self._length),
            (ProblemKind.CUT, self._cut),
            (ProblemKind.MASKED, self._masked),
            (ProblemKind.REWARD, self._reward),
        )
        for kind, rule in rules:
            if kind not in self._problems and (found := rule()) is not None:
                self._problems[kind] = LearningProblem(kind, step.step, *found)

    def add_totals(self, totals: RolloutTotals) -> None:
        """What was played so far. It matters until the first step: a run whose groups are all filtered never has one."""
        share = totals.filtered_share
        if self._first or ProblemKind.FILTERED in self._problems or totals.ended < FEW_GROUPS or share is None:
            return
        if share >= FILTERED_SHARE:
            mean = (
                "" if totals.mean_reward is None else f"; the mean reward of their samples is {totals.mean_reward:.2g}"
            )
            seen = (
                f"{totals.filtered:.0f} of {totals.ended:.0f} groups were filtered, so there is nothing to train{mean}"
            )
            self._problems[ProblemKind.FILTERED] = LearningProblem(ProblemKind.FILTERED, 0, seen, TOO_HARD)

    @property
    def _solved(self) -> float | None:
        """Solve rate of all samples if known: groups that are solved completely are filtered, so the trained samples look worse."""
        played = _mean(step.raw_solved for step in self._recent)
        return _mean(step.solved for step in self._recent) if played is None else played

    @property
    def _is_solved(self) -> bool:
        """Whether little is left to learn: almost all samples are solved or, where that is not known, have the best reward."""
        if (solved := self._solved) is not None:
            return solved >= SOLVED_SHARE
        first, now = (_mean(step.raw_reward for step in steps) for steps in (self._first, self._recent))
        best = self._highest_reward
        if first is None or now is None or best is None or best <= first:
            return False
        return best - now <= NEAR_BEST * (best - first)

    def _entropy(self) -> tuple[str, str] | None:
        before, now = (_mean(step.entropy for step in steps) for steps in (self._first, self._recent))
        if before is None or now is None or now >= COLLAPSED_ENTROPY * before or self._is_solved:
            return None
        return (
            f"the entropy fell from {before:.2g} to {now:.2g} nats, so the policy tries nothing new",
            "Raise trainer.clip_high or trainer.entropy_bonus, or lower trainer.lr",
        )

    def _variance(self) -> tuple[str, str] | None:
        filtered = _mean(step.filtered for step in self._recent)
        rewards = {step.reward for step in self._recent}
        is_filtered = filtered is not None and filtered >= FILTERED_SHARE
        is_constant = len(rewards) == 1 and None not in rewards
        if not (is_filtered or is_constant) or (is_constant and self._is_solved):
            return None
        seen = (
            f"{filtered:.0%} of the groups were filtered"
            if is_filtered
            else f"every reward is {self._recent[-1].reward:g}"
        )
        if self._is_solved:
            share = "nearly all samples have the best reward"
            if self._solved is not None:
                share = f"{self._solved:.0%} of the samples are solved"
            return f"{seen}, because {share}", "End the run, or add harder tasks"
        return (
            f"{seen}, and groups of equal rewards teach nothing",
            TOO_HARD,
        )

    def _ratio(self) -> tuple[str, str] | None:
        ratio = _mean(step.ratio for step in self._recent)
        weight = _mean(step.mismatch_weight for step in self._recent)
        ess = _mean(step.ess for step in self._recent)
        if ratio is not None and not 1 / MAX_RATIO <= ratio <= MAX_RATIO:
            seen = f"within a step, the mean ratio of the new to the old policy is {ratio:.2g}"
        elif weight is not None and not 1 / MAX_RATIO <= weight <= MAX_RATIO:
            seen = f"the mean ratio of the trained policy to the sampler is {weight:.2g}"
        elif ess is not None and ess < MIN_ESS:
            seen = f"the effective sample size is {ess:.0%} of the tokens"
        else:
            return None
        return (
            f"{seen}: the policy moves too far from the one that sampled",
            'Lower trainer.lr or gate.max_head_offpolicy_versions, or set trainer.old_logprobs = "engine" or trainer.correction',
        )

    def _length(self) -> tuple[str, str] | None:
        before, now = (_mean(step.response_tokens for step in steps) for steps in (self._first, self._recent))
        truncated = _mean(step.truncated for step in self._recent)
        if before is None or now is None or truncated is None or now < LONGER * before or truncated < TRUNCATED_SHARE:
            return None
        return (
            f"responses grew from {before:.0f} to {now:.0f} tokens, and {truncated:.0%} of the samples are truncated",
            "Set trainer.overlong_tokens, or trainer.mask_truncated, or raise rollout.sampling.max_tokens",
        )

    def _cut(self) -> tuple[str, str] | None:
        cut = _mean(step.cut for step in self._recent)
        if cut is None or cut < CUT_SHARE:
            return None
        return (
            f"{cut:.0%} of the samples ended by a limit of tokens, so their last answers are cut",
            "Raise rollout.sampling.max_tokens or rollout.max_total_tokens, or set trainer.mask_truncated. If an action has this "
            "length by design, set rollout.sampling.complete_at_max_tokens",
        )

    def _masked(self) -> tuple[str, str] | None:
        masked = _mean(step.masked for step in self._recent) or 0.0
        first = _mean(step.masked_first for step in self._recent) or 0.0
        turns = _mean(step.masked_first_turns for step in self._recent) or 0.0
        if max(masked, turns) < MASKED_SHARE:
            return None
        never = f"; {turns:.0%} of the episodes of several turns do not train their first turn" if turns else ""
        return (
            f"{masked:.0%} of the sampled tokens are older than the staleness bound and not trained, {first:.0%} in the first "
            f"quarter of the episodes{never}",
            "Raise gate.max_head_offpolicy_versions (2 to 4 for agents with many turns), raise gate.groups_per_step, or shorten "
            "the episodes",
        )

    def _reward(self) -> tuple[str, str] | None:
        now = _mean(step.reward for step in self._recent)
        if now is None:
            return None
        best = self._best_reward = max(now, now if self._best_reward is None else self._best_reward)
        if now >= FALLEN_SHARE * best or best - now < FALLEN_BY:
            return None
        return (
            f"the reward fell from {best:.2g} to {now:.2g}",
            "Unless harder tasks were opened: lower trainer.lr or gate.max_head_offpolicy_versions, or set "
            'trainer.old_logprobs = "engine"',
        )


def _memory(step: StepMetrics) -> tuple[str, str] | None:
    if step.failed_pass_tokens is None or step.pass_tokens is None:
        return None
    checkpointing = " and checkpointing" if step.is_checkpointing else ""
    return (
        f"the step did not fit in memory with passes of {step.failed_pass_tokens:.0f} tokens; trained with"
        f" {step.pass_tokens:.0f}{checkpointing}",
        f"To begin with passes that fit, set trainer.max_tokens_per_microbatch = {step.pass_tokens:.0f}"
        f"{' and trainer.gradient_checkpointing = true' if checkpointing else ''}, or give a policy server on the same GPU less"
        " (inference.kv_memory_mb)",
    )


def learning_problems(steps: Sequence[StepMetrics], totals: RolloutTotals | None = None) -> tuple[LearningProblem, ...]:
    """The problems of a whole run."""
    monitor = LearningMonitor()
    for step in steps:
        monitor.add(step)
    if totals is not None:
        monitor.add_totals(totals)
    return monitor.problems


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
