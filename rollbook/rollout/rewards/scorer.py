"""`Scorer`: computes the reward of a finished episode with the user's reward functions, and records the score of each.

    def correct(case: RewardCase) -> float | None: ...                       # or async def
    def ranked(cases: list[RewardCase]) -> list[float | None]: ...           # of a group

`None` and NaN mean "could not be scored": the sample is kept, unscorable, and never counted as 0.

Functions of groups are called after those of samples, once for the samples of a group or of its quorum. A late sample of a group in
parts gets a call of its own, with the stored samples of the quorum: its score depends on them and on itself only.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.rewards.judges import JudgePanel, open_judges
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.rewards.pool import RewardPool, open_reward_pool
from rollbook.rollout.settings import (
    COMPARED_FACT,
    JUDGE_COUNTS,
    LATE,
    SECONDS_KEY,
    TO_BE_SCORED,
    TOGETHER,
    CombinedReward,
    RewardFunction,
    RewardRules,
    Score,
    combine,
    combine_turns,
    is_ready,
    judge_key,
    score_key,
)
from rollbook.telemetry.events import EventLog

__all__ = ["TO_BE_SCORED", "RewardCase", "Scorer", "open_scorer"]


JUDGES_FACT = "judges"
"""Fact of a sample: what the judges of each reward function said."""
FAULTS_FACT = "reward_faults"
"""Fact of a sample: why reward functions failed."""
GROUP_CALLS = 3
"""A failed call of a function of groups would cost a whole group, so it is repeated. Judges have their own `attempts`."""
NOTHING_TO_COMPARE = (
    "its quorum has no stored sample with a reward, so the reward functions of groups cannot compare it"
)


class Scorer:
    def __init__(
        self,
        pool: RewardPool,
        rules: RewardRules,
        *,
        decode: Callable[[Sequence[int]], str],
        panels: Mapping[str, JudgePanel] | None = None,
    ) -> None:
        self._pool = pool
        self._panels = panels or {}
        self._rules = rules
        self._decode = decode

    async def score(self, row: Mapping[str, Any], sample: RolloutSample) -> RolloutSample:
        """The sample with its reward, or with the cause why it has none.

        A failed episode is not scored: the failure says nothing about the policy.
        """
        if not sample.is_scorable and sample.invalid_cause != TO_BE_SCORED:
            return sample
        case = case_of(row, sample, decode=self._decode)
        names = [function.name for function in self._rules.of_samples]
        scores = dict(zip(names, await asyncio.gather(*(self._score(name, case) for name in names)), strict=True))
        return scored(sample, self._rules, scores)

    async def _score(self, name: str, case: RewardCase) -> Score:
        panel = self._panels.get(name)
        return await (self._pool.score(name, case) if panel is None else panel.score(case))

    async def score_group(self, row: Mapping[str, Any], samples: Sequence[RolloutSample]) -> list[RolloutSample]:
        """The samples of a group, or of its quorum, with the scores of the functions of groups."""
        cases = [self._group_case(row, sample) for sample in samples]
        functions = self._rules.of_groups
        found = await asyncio.gather(*(self._group_scores(function, cases) for function in functions))
        by_name = dict(zip([function.name for function in functions], found, strict=True))
        return [
            with_group_scores(sample, self._rules, {name: scores[i] for name, scores in by_name.items()})
            for i, sample in enumerate(samples)
        ]

    async def score_late(
        self, row: Mapping[str, Any], sample: RolloutSample, quorum: Sequence[RolloutSample]
    ) -> RolloutSample:
        """A sample that finished after the quorum of its group was scored."""
        functions = self._rules.of_groups
        found = await asyncio.gather(*(self._late_score(function, row, sample, quorum) for function in functions))
        scores = dict(zip([function.name for function in functions], found, strict=True))
        return with_group_scores(sample, self._rules, scores, is_late=True)

    async def _late_score(
        self, function: RewardFunction, row: Mapping[str, Any], sample: RolloutSample, quorum: Sequence[RolloutSample]
    ) -> Score:
        if not quorum:
            return Score(cause=NOTHING_TO_COMPARE)
        cases = [self._group_case(row, one, scored_by=function) for one in quorum]
        cases = [case for case in cases if case.score is not None]
        if not cases:
            return Score()
        (score,) = await self._group_scores(function, [*cases, self._group_case(row, sample)], is_late=True)
        return score

    async def _group_scores(
        self, function: RewardFunction, cases: Sequence[RewardCase], *, is_late: bool = False
    ) -> list[Score]:
        """The score of each case; of the last one only, if it is late."""
        if (panel := self._panels.get(function.name)) is not None:
            return await panel.score_group(cases)
        for _ in range(GROUP_CALLS):
            result = await self._pool.score_group(function.name, cases)
            if result.cause is None:
                break
        values = result.values or (None,) * len(cases)
        wanted = values[-1:] if is_late else values
        return [Score(value=value, cause=result.cause, seconds=result.seconds) for value in wanted]

    def _group_case(
        self, row: Mapping[str, Any], sample: RolloutSample, *, scored_by: RewardFunction | None = None
    ) -> RewardCase:
        """The case of a sample that the functions of samples have scored: the same before and after it is stored."""
        case = case_of(row, sample, decode=self._decode)
        own = {score_key(function.name) for function in self._rules.of_groups} | {SECONDS_KEY}
        return dataclasses.replace(
            case,
            reward=sample.metrics.get(score_key("environment")),
            metrics={k: v for k, v in case.metrics.items() if k not in own and not k.startswith(judge_key(""))},
            facts={k: v for k, v in case.facts.items() if k not in (JUDGES_FACT, FAULTS_FACT, COMPARED_FACT)},
            score=None if scored_by is None else sample.metrics.get(score_key(scored_by.name)),
        )


@asynccontextmanager
async def open_scorer(
    rules: RewardRules,
    *,
    decode: Callable[[Sequence[int]], str],
    search_path: tuple[str, ...],
    log: EventLog,
    judgements: Path | None = None,
) -> AsyncIterator[Scorer]:
    """`decode` turns tokens into text, for episodes without recorded messages. `judgements`: file for the answers of judges."""
    async with (
        open_judges(rules.functions, search_path=search_path, store=judgements) as panels,
        open_reward_pool(rules, search_path=search_path, log=log) as pool,
    ):
        yield Scorer(pool, rules, decode=decode, panels=panels)


def scored(sample: RolloutSample, rules: RewardRules, scores: Mapping[str, Score]) -> RolloutSample:
    """The sample with the combined score of the functions of samples. Pure."""
    verdict = combine(rules, scores, environment=sample.reward)
    found = _recorded(sample, scores)
    if sample.reward is not None:
        found = dataclasses.replace(found, metrics={**found.metrics, score_key("environment"): float(sample.reward)})
    earned = sample.turn_rewards
    turns = combine_turns(rules, scores, environment=None if earned is None else earned.tolist())
    # Rewards of turns that do not count are removed: the sum of the turns is what the reward is made of.
    if turns is None and earned is not None:
        turns = [0.0] * len(sample.turns)
    return _with_reward(found, verdict, turns=turns)


def with_group_scores(
    sample: RolloutSample, rules: RewardRules, scores: Mapping[str, Score], *, is_late: bool = False
) -> RolloutSample:
    """A sample that the functions of samples have scored, with the scores of those of groups. Pure."""
    known = {f.name: Score(value=sample.metrics.get(score_key(f.name))) for f in rules.of_samples}
    environment = sample.metrics.get(score_key("environment"))
    verdict = combine(rules, {**known, **scores}, environment=environment)
    found = _recorded(sample, scores)
    facts = {**found.facts, COMPARED_FACT: LATE if is_late else TOGETHER}
    return _with_reward(dataclasses.replace(found, facts=facts), verdict)


def _with_reward(
    sample: RolloutSample, verdict: CombinedReward, *, turns: Sequence[float] | None = None
) -> RolloutSample:
    """Unscorable if it cannot have this reward: a number beyond the limit, or no trained token."""
    try:
        found = dataclasses.replace(sample, reward=verdict.reward, invalid_cause=verdict.cause)
        return found if turns is None or not is_ready(found) else found.with_turns(rewards=turns)
    except ValueError as error:
        return dataclasses.replace(sample, reward=None, invalid_cause=f"rollout.rewards: {error}")


def _recorded(sample: RolloutSample, scores: Mapping[str, Score]) -> RolloutSample:
    """The sample with what the functions reported, besides what others reported before."""
    seconds = [score.seconds for score in scores.values()]
    metrics = {
        **sample.metrics,
        **{score_key(name): score.value for name, score in scores.items() if score.value is not None},
        SECONDS_KEY: max([*seconds, float(sample.metrics.get(SECONDS_KEY, 0.0))]),
    }
    for spent in (score.usage for score in scores.values()):
        if spent is not None:
            for name in JUDGE_COUNTS:
                metrics[judge_key(name)] = metrics.get(judge_key(name), 0.0) + float(getattr(spent, name))
    faults = {name: score.cause for name, score in scores.items() if score.cause is not None}
    notes = {
        name: [{"model": note.model, "score": note.score, "text": note.text} for note in score.notes]
        for name, score in scores.items()
        if score.notes
    }
    facts = dict(sample.facts)
    for fact, added in ((FAULTS_FACT, faults), (JUDGES_FACT, notes)):
        if added:
            facts[fact] = {**facts.get(fact, {}), **added}
    return dataclasses.replace(sample, metrics=metrics, facts=facts)


def case_of(row: Mapping[str, Any], sample: RolloutSample, *, decode: Callable[[Sequence[int]], str]) -> RewardCase:
    messages = sample.messages or ()
    response = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), None)
    if response is None and sample.turns:
        last = sample.turns[-1]
        response = decode(sample.sequences[last.sequence].token_ids[last.start : last.end].tolist())
    return RewardCase(
        row=dict(row),
        # Messages may hold any values that a chat template reads; the reward process gets plain ones.
        messages=tuple(msgspec.to_builtins(dict(message)) for message in messages),
        response=response if isinstance(response, str) else "",
        finish_reason=sample.finish_reason,
        reward=sample.reward,
        solved=sample.solved,
        num_sampled=sample.num_trained,
        metrics=dict(sample.metrics),
        facts=dict(sample.facts),
        num_turns=len(sample.turns),
        turn_rewards=None if (earned := sample.turn_rewards) is None else tuple(earned.tolist()),
    )
