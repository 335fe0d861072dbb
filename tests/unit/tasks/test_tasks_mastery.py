"""Mastery of tasks and tiers: what raises it, what lowers it, and what has no effect."""

import pytest

from rollbook.contracts.task import TaskId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery import TaskMastery, TierProgress, decayed_rate, success_of
from tests.parts.tasks.curriculum import outcome, play, rules, tiered


def task_after(*results: float, **changed: object) -> TaskMastery:
    mastery = TaskMastery()
    for result in results:
        mastery = mastery.after(result, rules(**changed))
    return mastery


def tier_after(*results: float, rank: int = 0, start: TierProgress | None = None, **changed: object) -> TierProgress:
    progress = start or TierProgress()
    for position, result in enumerate(results, start=100):
        progress = progress.after(result, rank=rank, position=position, num_tiers=3, rules=rules(**changed))
    return progress


def test_a_rate_weighs_newer_results_more() -> None:
    assert decayed_rate([], 0.5) == 0
    assert decayed_rate([1.0, 0.0], 1.0) == 0.5
    assert decayed_rate([0.0, 1.0], 0.5) == pytest.approx(2 / 3)
    assert decayed_rate([1.0, 0.0], 0.5) == pytest.approx(1 / 3)


def test_success_is_the_solve_rate_or_the_clipped_reward() -> None:
    assert success_of(outcome(0.25, reward=0.9)) == 0.25
    assert success_of(outcome(None, reward=3.0)) == 1.0
    assert success_of(outcome(None, reward=-3.0)) == 0.0


def test_a_draw_that_could_not_be_scored_is_not_a_failure() -> None:
    assert success_of(outcome(None)) is None
    curriculum = Curriculum(tiered(1))
    play(curriculum, 5, lambda _: None)
    assert curriculum.mastery(TaskId("a0")) == TaskMastery()


def test_a_task_graduates_by_rate_and_count() -> None:
    assert not task_after(1, 1).is_graduated, "two tries are too few"
    assert task_after(1, 1, 1).is_graduated
    assert not task_after(1, 1, 0).is_graduated, "the rate is too low"
    assert task_after(0, 0, 1, 1, 1, 1, 1, 1).is_graduated, "old failures lose weight"
    assert not task_after(*[1] * 5, graduate_tries=6).is_graduated
    assert not task_after(*[0.8] * 5, graduate_rate=0.9).is_graduated


def test_a_graduated_task_relapses_only_below_the_relapse_rate() -> None:
    once = task_after(1, 1, 1, 1, 1, 0)
    assert once.is_graduated
    assert once.reviews == 0, "a failed review resets the intervals"
    assert not task_after(1, 1, 1, 1, 1, 0, 0, 0).is_graduated
    assert task_after(1, 1, 1, 1, 1, 0, 0, 0, relapse_rate=0.1).is_graduated


def test_successful_reviews_are_counted() -> None:
    assert [task_after(*[1] * n).reviews for n in range(3, 7)] == [0, 1, 2, 3]


def test_only_the_window_is_kept() -> None:
    assert task_after(*[0.5] * 50, task_window=4).results == (0.5,) * 4
    assert len(tier_after(*[0.5] * 50, tier_window=30).results) == 30


def test_the_next_tier_opens_by_rate_and_number_of_draws() -> None:
    assert tier_after(*[0.8] * 9).highest_open == 0
    assert tier_after(*[0.8] * 10).highest_open == 1
    assert tier_after(*[0.6] * 50).highest_open == 0
    assert tier_after(*[0.8] * 4, promote_tries=4).opened_at == (0, 103), "it opened with the result at position 103"
    assert tier_after(*[0.6] * 10, promote_rate=0.6).highest_open == 1


def test_the_fast_track_opens_a_tier_after_a_few_good_draws() -> None:
    assert tier_after(1, 1).highest_open == 0
    assert tier_after(1, 1, 1).highest_open == 1
    assert tier_after(1, 1, 1, fast_track_tries=5).highest_open == 0
    assert tier_after(0.9, 0.9, 0.9, fast_track_rate=1.0).highest_open == 0


def test_a_tier_without_success_closes_and_does_not_reopen_by_the_fast_track() -> None:
    opened = TierProgress((0, 7))
    assert tier_after(*[0] * 19, rank=1, start=opened).highest_open == 1
    closed = tier_after(*[0] * 20, rank=1, start=opened)
    assert (closed.highest_open, closed.is_on_probation) == (0, True)
    assert tier_after(*[0.1] * 30, rank=1, start=opened).highest_open == 1, "some draws succeed"
    assert tier_after(*[0] * 5, rank=1, start=opened, demote_tries=5).highest_open == 0
    assert tier_after(*[0.1] * 20, rank=1, start=opened, demote_rate=0.2).highest_open == 0
    assert tier_after(*[1] * 9, start=closed).highest_open == 0, "no fast track on probation"
    reopened = tier_after(*[1] * 10, start=closed)
    assert (reopened.highest_open, reopened.is_on_probation) == (1, False)


def test_the_lowest_tier_never_closes_and_nothing_opens_above_the_highest() -> None:
    assert tier_after(*[0] * 100).highest_open == 0
    assert tier_after(*[1] * 100, rank=2, start=TierProgress((0, 1, 2))).highest_open == 2


def test_results_of_other_tiers_have_no_effect_on_tiers() -> None:
    opened = TierProgress((0, 7))
    assert tier_after(*[1] * 50, rank=0, start=opened) == opened
