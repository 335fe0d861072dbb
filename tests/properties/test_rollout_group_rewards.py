"""Reward functions of groups, under every order in which samples finish: what a value depends on, and that it never changes."""

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.admission import OpenPart
from rollbook.contracts.group import GroupId, part_id
from rollbook.contracts.group_codec import decode_group
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.rewards.config import RewardsConfig
from rollbook.rollout.rewards.group_functions import diversity, pass_at
from rollbook.rollout.rewards.main import checked_values
from rollbook.rollout.rewards.messages import Call, RewardCase, encode, to_child
from rollbook.rollout.rewards.scorer import NOTHING_TO_COMPARE, Scorer
from rollbook.rollout.settings import COMPARED_FACT, TOGETHER, Score
from tests.parts.rollout.rewards import compared
from tests.unit.rollout.test_rollout_group import sample
from tests.unit.rollout.test_rollout_parts import Stage

REWARDS = {"functions": {"compared": {"path": "tests.parts.rollout.rewards:compared", "group": True}}}


class PoolHere:
    """Calls `compared` in this process, with what a reward process would receive."""

    async def score_group(self, function: str, cases: Sequence[RewardCase]) -> Score:
        call = to_child.decode(encode(Call(number=0, function=function, cases=tuple(cases), is_group=True)))
        await asyncio.sleep(0)
        values, cause = checked_values(compared(list(call.cases)), len(cases))
        return Score(values=values, cause=cause)


def scorer() -> Scorer:
    rules = RewardsConfig.model_validate(REWARDS).rules
    assert rules is not None
    return Scorer(PoolHere(), rules, decode=str)  # type: ignore[arg-type]


def said(text: str) -> RolloutSample:
    return dataclasses.replace(sample(1.0), messages=({"role": "assistant", "content": text},))


def text_of(one: RolloutSample) -> str:
    assert one.messages is not None
    return str(one.messages[0]["content"])


def expected(texts: Sequence[str], scores: Sequence[float | None]) -> list[float | None]:
    """What `compared` gives these samples, whose environment gave each the reward 1."""
    num = sample(1.0).num_trained
    cases = zip(texts, scores, strict=True)
    return compared(
        [RewardCase(row={}, response=text, score=score, reward=1.0, num_sampled=num) for text, score in cases]
    )


@st.composite
def plays(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, str]]]]:
    """A quorum, and the moments of a group: which episodes end, and what they said."""
    size = draw(st.integers(2, 6))
    texts = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "bad"]), min_size=size, max_size=size))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    moments = [order[i:j] for i, j in zip([0, *cuts], [*cuts, size], strict=True)]
    return draw(st.integers(2, size)), [[(n, texts[n]) for n in moment] for moment in moments]


async def played(
    quorum: int, moments: Sequence[Sequence[tuple[int, str]]], *, size: int, part: OpenPart, first: bytes | None = None
) -> list[PlayedPart]:
    async with Stage(
        part,
        scorer=scorer(),
        first_part=first,
        completions_per_prompt=size,
        quorum=quorum,
        min_samples=1,
        rewards=REWARDS,
    ) as stage:
        for moment in moments:
            await stage.end(**{f"e{number}": said(text) for number, text in moment})
        return stage.results


def require_values(results: Sequence[PlayedPart], *, quorum: int, first: PlayedPart | None = None) -> None:
    """The values of the quorum come from its samples alone, and those of a late sample from the quorum and itself."""
    groups = [decode_group(result.encoded.payload) for result in results if result.encoded.payload]
    stored = [one for group in groups for one in group.samples]
    begun = stored if first is None else list(decode_group(first.encoded.payload).samples)
    together = [one for one in begun if one.facts[COMPARED_FACT] == TOGETHER]
    if first is None:
        assert len(together) == min(quorum, len(stored))
        assert [one.reward for one in together] == expected([text_of(o) for o in together], [None] * len(together))
    known = [one for one in together if one.reward is not None]
    for one in stored:
        if one.facts[COMPARED_FACT] != TOGETHER:
            cases = [*map(text_of, known), text_of(one)], [*(o.reward for o in known), None]
            assert one.reward == (expected(*cases)[-1] if known else None)
            if not known:
                assert NOTHING_TO_COMPARE in str(one.invalid_cause)
    baseline = results[0].baseline
    assert baseline is not None
    assert {result.baseline for result in results} == {baseline}, "the rewards of the quorum never change"
    if first is None:
        of_first = [one.reward for one in groups[0].samples if one.reward is not None]
        assert list(baseline) == of_first[:quorum]


@settings(max_examples=30, deadline=None)
@given(plays())
def test_the_quorum_is_scored_once_and_a_late_sample_depends_on_the_quorum_and_itself_only(
    play: tuple[int, list[list[tuple[int, str]]]],
) -> None:
    quorum, moments = play
    size = sum(map(len, moments))
    whole = OpenPart(group_id=GroupId("t@0"), number=1, num_samples=size)
    results = asyncio.run(played(quorum, moments, size=size, part=whole))
    assert results[-1].is_last
    assert sum(result.outcome.num_samples for result in results) == size
    require_values(results, quorum=quorum)


@settings(max_examples=30, deadline=None)
@given(plays(), st.data())
def test_after_a_kill_the_same_samples_get_the_same_values(
    play: tuple[int, list[list[tuple[int, str]]]], data: st.DataObject
) -> None:
    quorum, moments = play
    size = sum(map(len, moments))
    whole = OpenPart(group_id=GroupId("t@0"), number=1, num_samples=size)
    results = asyncio.run(played(quorum, moments, size=size, part=whole))
    if len(results) == 1:
        return
    survived = results[: data.draw(st.integers(1, len(results) - 1), label="stored parts")]
    lost = [text_of(one) for result in results[len(survived) :] for one in decode_group(result.encoded.payload).samples]
    number = len(survived) + 1
    rest = OpenPart(
        group_id=part_id(GroupId("t@0"), number), number=number, num_samples=len(lost), baseline=results[0].baseline
    )
    order = data.draw(st.permutations(range(len(lost))), label="order of the second attempt")
    again = asyncio.run(
        played(
            quorum,
            [[(n, lost[n])] for n in order],
            size=size,
            part=rest,
            first=results[0].encoded.payload,
        )
    )
    require_values(again, quorum=quorum, first=results[0])
    assert rewards_by_text(again) == rewards_by_text(results[len(survived) :])


def rewards_by_text(results: Sequence[PlayedPart]) -> set[tuple[str, float | None]]:
    stored = [one for result in results for one in decode_group(result.encoded.payload).samples]
    return {(text_of(one), one.reward) for one in stored}


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 9))
def test_pass_at_k_is_the_chance_over_all_sets_of_k_samples_with_this_one(solved: list[bool], k: int) -> None:
    drawn = min(k, len(solved))
    for number, value in enumerate(pass_at(k)([RewardCase(row={}, solved=one) for one in solved])):
        sets = [chosen for chosen in combinations(range(len(solved)), drawn) if number in chosen]
        hits = sum(any(solved[i] for i in chosen) for chosen in sets)
        assert math.isclose(value, hits / len(sets), abs_tol=1e-12)


def test_pass_at_k_without_an_outcome_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"rollout\.rewards\.solved_by"):
        pass_at(2)([RewardCase(row={}), RewardCase(row={}, solved=True)])


@given(st.lists(st.text("ab ", max_size=12), min_size=1, max_size=6))
def test_diversity_is_0_for_equal_texts_and_never_outside_of_0_and_1(texts: list[str]) -> None:
    def values(given: Sequence[str]) -> list[Any]:
        return diversity([RewardCase(row={}, response=text) for text in given])

    assert all(0.0 <= value <= 1.0 for value in values(texts))
    assert values([texts[0]] * 3) == [0.0] * 3
    assert values(["one two three four", "five six seven"]) == [1.0, 1.0]
