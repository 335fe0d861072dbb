"""The alert when nearly all groups are filtered."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.dispatch.reporter import FILTER_ALERT_SHARE, FilterAlert, FilterMonitor


def alerts_of(groups: list[bool], *, window: int, reward: float | None = 0.0) -> list[FilterAlert]:
    monitor = FilterMonitor(window)
    return [alert for is_filtered in groups if (alert := monitor.record(is_filtered=is_filtered, reward=reward))]


def test_an_alert_is_raised_once_and_again_after_it_was_cleared() -> None:
    filtered, kept = [True] * 30, [False] * 30
    assert len(alerts_of(filtered, window=10)) == 1
    assert len(alerts_of(filtered + kept + filtered, window=10)) == 2


def test_no_alert_is_raised_before_the_window_is_full() -> None:
    assert alerts_of([True] * 9, window=10) == []


def test_the_advice_contains_the_mean_reward() -> None:
    [alert] = alerts_of([True] * 10, window=10, reward=0.97)
    assert (alert.filtered, alert.of) == (10, 10)
    assert "0.97" in alert.advice


def test_groups_without_a_reward_still_get_advice() -> None:
    [alert] = alerts_of([True] * 10, window=10, reward=None)
    assert "rollbook explain" in alert.advice


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 20))
def test_an_alert_is_raised_only_above_the_share(groups: list[bool], window: int) -> None:
    monitor = FilterMonitor(window)
    for at, is_filtered in enumerate(groups):
        alert = monitor.record(is_filtered=is_filtered, reward=1.0)
        if alert is not None:
            seen = groups[max(0, at + 1 - window) : at + 1]
            assert alert.filtered == sum(seen)
            assert alert.of == len(seen) == window
            assert sum(seen) / window >= FILTER_ALERT_SHARE
