"""Groups in parts: the first with a quorum, the others as samples finish, all with the same baseline."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.concurrency.clock import Clock, ManualClock
from rollbook.contracts.admission import OpenPart
from rollbook.contracts.group import DropKind, GroupId, PromptGroup
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.parts import GroupParts
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.rewards.scorer import Scorer
from tests.unit.rollout.test_rollout_group import HurriedClock, sample

WHOLE = OpenPart(group_id=GroupId("t@0"), number=1, num_samples=4)


class Stage:
    """Episodes that end when the test says so, in the order of the test."""

    def __init__(
        self,
        part: OpenPart = WHOLE,
        *,
        clock: Clock | None = None,
        scorer: Scorer | None = None,
        first_part: bytes | None = None,
        **settings: Any,
    ) -> None:
        self._clock = clock or HurriedClock()
        self.results: list[PlayedPart] = []
        self._ends: list[asyncio.Future[Any]] = []
        self._have_started = asyncio.Event()
        self._part = part
        self._scorer = scorer
        self._first_part = first_part
        self._config = RolloutConfig.model_validate(
            {"completions_per_prompt": 4, "quorum": 2, "retry_budget": 0, **settings}
        )

    async def __aenter__(self) -> "Stage":
        score = None if self._scorer is None else self._scorer.score
        assembler = GroupPlayer(self._rollout, self._config, score=score, group_scorer=self._scorer, clock=self._clock)
        order = GroupOrder(
            group_id=self._part.group_id,
            attempt=1,
            task_id=TaskId("t"),
            draw=0,
            row={},
            min_publication=0,
            deadline_s=60.0,
            part=self._part.number,
            num_samples=self._part.num_samples,
            baseline=self._part.baseline,
            first_part=self._first_part,
        )

        async def play() -> None:
            await self._on_part(await assembler.play(order, self._on_part))

        self._playing = asyncio.create_task(play())
        await self._have_started.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)

    async def _rollout(self, row: dict[str, Any]) -> Any:
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._ends.append(end)
        if len(self._ends) == self._part.num_samples:
            self._have_started.set()
        return await end

    async def _on_part(self, result: PlayedPart) -> None:
        self.results.append(result)

    async def end(self, **outcomes: Any) -> None:
        """End episodes by number: `e0=sample(1.0)`; an exception is raised, None is declined. Those of one call end together."""
        for name, outcome in outcomes.items():
            end = self._ends[int(name[1:])]
            if isinstance(outcome, Exception):
                end.set_exception(outcome)
            else:
                end.set_result(outcome)
        for _ in range(30):
            await asyncio.sleep(0)

    @property
    def parts(self) -> list[tuple[str, list[float | None], tuple[float, ...] | None]]:
        return [
            (result.group.id, [s.reward for s in result.group.samples], result.group.baseline)
            for result in self.results
            if result.group is not None
        ]


async def test_the_first_part_waits_for_the_quorum_and_the_others_for_nothing() -> None:
    async with Stage() as stage:
        await stage.end(e2=sample(1.0))
        assert stage.parts == []
        await stage.end(e0=sample(0.0))
        await stage.end(e3=sample(0.5))
        assert stage.parts == [("t@0", [1.0, 0.0], (1.0, 0.0)), ("t@0/2", [0.5], (1.0, 0.0))]
        assert [result.is_last for result in stage.results] == [False, False]
        await stage.end(e1=sample(1.0))
        assert stage.parts[2] == ("t@0/3", [1.0], (1.0, 0.0))
        assert stage.results[2].is_last
        assert stage.results[2].missing is None


async def test_samples_of_one_moment_are_one_part() -> None:
    async with Stage() as stage:
        await stage.end(e0=sample(1.0), e1=sample(0.0), e2=sample(0.5), e3=sample(0.25))
        assert stage.parts == [("t@0", [1.0, 0.0, 0.5, 0.25], (1.0, 0.0))]
        assert stage.results[0].is_last


async def test_a_group_whose_episodes_have_all_ended_is_not_kept_for_more_samples() -> None:
    clock = ManualClock()  # nothing that sleeps wakes
    async with Stage(clock=clock) as stage:
        await stage.end(e0=sample(1.0), e1=sample(0.0), e2=sample(0.5))
        assert stage.parts == [], "the fourth sample may come in the same moment"
        await stage.end(e3=sample(0.25))
        assert stage.parts == [("t@0", [1.0, 0.0, 0.5, 0.25], (1.0, 0.0))]
        assert stage.results[0].is_last


async def test_an_unscorable_sample_is_stored_and_is_not_in_the_quorum() -> None:
    async with Stage() as stage:
        await stage.end(e0=sample(None))
        await stage.end(e1=sample(1.0))
        assert stage.parts == []
        await stage.end(e2=sample(0.0))
        assert stage.parts == [("t@0", [None, 1.0, 0.0], (1.0, 0.0))]
        assert stage.results[0].outcome.invalid_causes == {"grader is down": 1}
        await stage.end(e3=sample(None))
        last = stage.results[1]
        assert last.drop is not None
        assert (last.drop.kind, last.is_last) == (DropKind.INVALID, True)
        assert last.outcome.invalid_causes == {"grader is down": 1}, "causes are counted in one part only"


async def test_episodes_without_a_sample_are_reported_as_missing_with_the_cause() -> None:
    async with Stage() as stage:
        await stage.end(e0=sample(1.0), e1=sample(0.0))
        await stage.end(e2=ValueError("no"))
        await stage.end(e3=sample(1.0))
        last = stage.results[-1]
        assert (last.is_last, last.drop) == (True, None)
        assert last.missing is not None
        assert str(last.missing).startswith("invalid: 1 samples are missing (1 x rollout raised ValueError: no)")
    async with Stage() as stage:
        await stage.end(e0=sample(1.0), e1=sample(0.0), e2=None)
        await stage.end(e3=None)
        last = stage.results[-1]
        assert (last.group, last.is_last) == (None, True)
        assert str(last.missing) == "filtered: declined: rollout returned None for 2 samples"


async def test_a_group_that_ends_without_a_quorum_is_dropped_like_a_whole_group() -> None:
    async with Stage() as stage:
        await stage.end(e0=sample(1.0), e1=sample(None), e2=ValueError("no"))
        assert stage.results == []
        await stage.end(e3=sample(None))
        (result,) = stage.results
        assert result.drop is not None
        assert str(result.drop).startswith("invalid: 1 of 4 samples scorable, min_samples is 2")
        assert stage.parts == [("t@0", [1.0, None, None], (1.0,))]


async def test_another_attempt_at_what_is_left_keeps_the_baseline_and_the_numbers() -> None:
    left = OpenPart(group_id=GroupId("t@0/3"), number=3, num_samples=2, baseline=(1.0, 0.0))
    async with Stage(left) as stage:
        await stage.end(e1=sample(0.25))
        await stage.end(e0=sample(0.5))
        assert stage.parts[0] == ("t@0/3", [0.25], (1.0, 0.0))
        assert stage.parts[1][0] == "t@0/4"
        assert stage.results[0].drop is None
        assert str(stage.results[1].drop) == "filtered: constant_reward", "0.5 is the mean of the quorum"


@given(
    moments=st.lists(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=3), min_size=1, max_size=6),
    quorum=st.integers(2, 5),
)
def test_every_sample_is_in_exactly_one_part_in_order(moments: Sequence[Sequence[float | None]], quorum: int) -> None:
    parts = GroupParts(group_id=GroupId("t@0"), task_id=TaskId("t"), draw=0, num_samples=18, quorum=quorum)
    added: list[RolloutSample] = []
    taken: list[PromptGroup] = []
    for number, rewards in enumerate(moments, start=1):
        for reward in rewards:
            added.append(sample(reward))
            parts.add(0, added[-1])
        if (part := parts.take(is_last=number == len(moments))) is not None:
            taken.append(part)
    assert [id(s) for part in taken for s in part.samples] == [id(s) for s in added]
    assert [part.part for part in taken] == list(range(1, len(taken) + 1))
    rewards_in_order = [s.reward for s in added if s.reward is not None]
    assert {part.baseline for part in taken} == {tuple(rewards_in_order[:quorum])}
    assert len(taken) == 1 or len(taken[0].scorable) >= quorum


@pytest.mark.parametrize(
    ("size", "given_quorum", "expected"),
    [(8, None, 6), (4, None, 3), (2, None, 2), (3, None, 3), (1, None, 1), (8, 8, 8)],
)
def test_the_quorum_is_three_quarters_of_the_group_unless_it_is_set(
    size: int, given_quorum: int | None, expected: int
) -> None:
    config = RolloutConfig.model_validate({"completions_per_prompt": size, "quorum": given_quorum})
    assert config.quorum_size == expected


def test_a_quorum_larger_than_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="quorum is 9, but a group has 8 samples: it would never be reached"):
        RolloutConfig.model_validate({"completions_per_prompt": 8, "quorum": 9})
