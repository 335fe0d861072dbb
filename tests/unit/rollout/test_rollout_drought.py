"""When hardly any group teaches, a run says so, once."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.dispatch.filter_alert import DRY, Drought, FilterWatch


def told(ends: list[bool], *, window: int, reward: float | None = 0.0) -> list[Drought]:
    watch = FilterWatch(window)
    return [drought for end in ends if (drought := watch.record(is_filtered=end, reward=reward))]


def test_a_drought_is_told_once_and_a_second_one_again() -> None:
    dry, wet = [True] * 30, [False] * 30
    assert len(told(dry, window=10)) == 1
    assert len(told(dry + wet + dry, window=10)) == 2


def test_nothing_is_said_before_the_window_is_full() -> None:
    assert told([True] * 9, window=10) == []


def test_the_advice_names_the_mean_reward() -> None:
    [drought] = told([True] * 10, window=10, reward=0.97)
    assert (drought.filtered, drought.of) == (10, 10)
    assert "0.97" in drought.advice


def test_groups_without_a_reward_still_get_advice() -> None:
    [drought] = told([True] * 10, window=10, reward=None)
    assert "rollbook explain" in drought.advice


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 20))
def test_whatever_is_told_was_dry(ends: list[bool], window: int) -> None:
    watch = FilterWatch(window)
    for at, end in enumerate(ends):
        drought = watch.record(is_filtered=end, reward=1.0)
        if drought is not None:
            seen = ends[max(0, at + 1 - window) : at + 1]
            assert drought.filtered == sum(seen)
            assert drought.of == len(seen) == window
            assert sum(seen) / window >= DRY
