"""`Scorer`: computes the reward of a finished episode with the user's reward functions, and records the score of each.

    def correct(case: RewardCase) -> float | None: ...          # or async def

`None` and NaN mean "could not be scored": the sample is kept, unscorable, and never counted as 0.
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
    JUDGE_COUNTS,
    SECONDS_KEY,
    TO_BE_SCORED,
    JudgeUsage,
    RewardRules,
    Score,
    combine,
    combine_turns,
    judge_key,
    score_key,
)
from rollbook.telemetry.events import EventLog

__all__ = ["TO_BE_SCORED", "RewardCase", "Scorer", "open_scorer"]


JUDGES_FACT = "judges"
"""Fact of a sample: what the judges of each reward function said."""


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
        names = [function.name for function in self._rules.functions]
        scores = dict(zip(names, await asyncio.gather(*(self._score(name, case) for name in names)), strict=True))
        return scored(sample, self._rules, scores)

    async def _score(self, name: str, case: RewardCase) -> Score:
        panel = self._panels.get(name)
        return await (self._pool.score(name, case) if panel is None else panel.score(case))


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
    """The sample with the combined score of the functions. Pure."""
    verdict = combine(rules, scores, environment=sample.reward)
    values = {score_key(name): score.value for name, score in scores.items() if score.value is not None}
    metrics = {**sample.metrics, **values, SECONDS_KEY: max((s.seconds for s in scores.values()), default=0.0)}
    if sample.reward is not None:
        metrics[score_key("environment")] = float(sample.reward)
    faults = {name: score.cause for name, score in scores.items() if score.cause is not None}
    notes = {
        name: [{"model": note.model, "score": note.score, "text": note.text} for note in score.notes]
        for name, score in scores.items()
        if score.notes
    }
    facts = {
        **sample.facts,
        **({"reward_faults": faults} if faults else {}),
        **({JUDGES_FACT: notes} if notes else {}),
    }
    spent = JudgeUsage()
    for score in scores.values():
        if score.usage is not None:
            spent.include(score.usage)
    if any(score.usage is not None for score in scores.values()):
        metrics |= {judge_key(name): float(getattr(spent, name)) for name in JUDGE_COUNTS}
    found = dataclasses.replace(
        sample, reward=verdict.reward, invalid_cause=verdict.cause, metrics=metrics, facts=facts
    )
    earned = sample.turn_rewards
    turns = combine_turns(rules, scores, environment=None if earned is None else earned.tolist())
    # Rewards of turns that do not count are removed: the sum of the turns is what the reward is made of.
    if turns is None and earned is not None:
        turns = [0.0] * len(sample.turns)
    return found if turns is None or not found.is_scorable else found.with_turns(rewards=turns)


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
