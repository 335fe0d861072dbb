"""Evaluation results: means over tasks, confidence intervals, and unscorable episodes left out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.evaluation import PlayedTask, by_label, mean_share, share_of_publication, summarise, wilson


def played(
    label: str, rewards: list[float], solved: list[bool], *, unscorable: int = 0, publication: int = 3
) -> PlayedTask:
    return PlayedTask(
        task_id="t",
        label=label,
        rewards=tuple(rewards),
        solved=tuple(solved),
        unscorable=unscorable,
        response_tokens=4.0,
        turns=1.0,
        publications=frozenset({publication}),
    )


def test_a_task_counts_once_however_often_it_was_played() -> None:
    result = summarise("all", [played("a", [1.0] * 9, [True] * 9), played("a", [0.0], [False])])
    assert result.reward is not None
    assert result.solved is not None
    assert (result.reward.mean, result.solved.mean) == (0.5, 0.5)
    assert (result.tasks, result.episodes) == (2, 10)


def test_tasks_solved_at_least_once_are_reported_with_the_mean() -> None:
    tasks = [played("a", [1.0, 0.0], [True, False]), played("a", [0.0, 0.0], [False, False])]
    result = summarise("all", tasks)
    assert result.solved is not None
    assert result.solved_once is not None
    assert (result.solved.mean, result.solved_once.mean) == (0.25, 0.5)
    assert result.row()["solved_once"]["mean"] == 0.5


def test_unscorable_episodes_are_counted_and_left_out_of_the_means() -> None:
    result = summarise("all", [played("a", [1.0], [True]), played("a", [], [], unscorable=2)])
    assert result.reward is not None
    assert result.reward.mean == 1.0
    assert (result.tasks, result.unscorable) == (2, 2)
    nothing = summarise("all", [played("a", [], [], unscorable=1)])
    assert nothing.reward is None
    assert nothing.solved is None


def test_labels_are_reported_in_order_of_appearance_after_all_tasks() -> None:
    tasks = [played("hard", [0.0], [False]), played("easy", [1.0], [True]), played("hard", [1.0], [True])]
    assert [(r.label, r.tasks, r.reward and r.reward.mean) for r in by_label(tasks)] == [
        ("all", 3, pytest.approx(2 / 3)),
        ("hard", 2, 0.5),
        ("easy", 1, 1.0),
    ]
    assert [r.label for r in by_label(tasks[:1])] == ["all"]


@given(successes=st.integers(min_value=0, max_value=200), more=st.integers(min_value=0, max_value=200))
def test_the_interval_of_a_rate_contains_the_rate_and_stays_within_0_and_1(successes: int, more: int) -> None:
    count = max(1, successes + more)
    share = wilson(min(successes, count), count)
    assert 0.0 <= share.low <= share.mean <= share.high <= 1.0
    assert share.high > share.low
    # Ten times the evidence for the same rate never widens it.
    wide, narrow = share, wilson(10 * min(successes, count), 10 * count)
    assert narrow.high - narrow.low <= wide.high - wide.low


def test_the_interval_of_a_rate_is_wilsons() -> None:
    # 8 of 10, from the textbook: 0.49 to 0.94.
    share = wilson(8, 10)
    assert (round(share.low, 2), round(share.high, 2)) == (0.49, 0.94)
    assert wilson(0, 20).high == pytest.approx(0.161, abs=1e-3)


def test_the_interval_of_one_value_has_no_width() -> None:
    assert mean_share([0.25]) == mean_share([0.25])
    share = mean_share([0.0, 1.0] * 50)
    assert share.high - share.low == pytest.approx(2 * 1.959964 * math.sqrt(0.25 * 100 / 99) / 10)


def test_the_share_of_a_publication_counts_tasks_sampled_only_by_it() -> None:
    assert share_of_publication([played("a", [1.0], [True]), played("a", [1.0], [True], publication=4)], 3) == 0.5
