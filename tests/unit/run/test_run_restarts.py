"""The restart rule: long-lived processes are always restarted; processes that repeatedly die early are given up."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.run.supervision.restarts import GiveUp, Restart, RestartRule


def test_the_first_restart_is_almost_immediate_and_waits_grow() -> None:
    rule = RestartRule(most_quick_deaths=4, healthy_s=10, first_wait_s=0.2, most_wait_s=1.0)
    waits = [rule.decide([1.0] * deaths) for deaths in (1, 2, 3, 4)]
    assert waits == [Restart(0.2), Restart(0.4), Restart(0.8), Restart(1.0)]


def test_a_process_that_repeatedly_dies_soon_after_it_is_ready_is_given_up() -> None:
    decision = RestartRule(most_quick_deaths=4, healthy_s=10).decide([1.0] * 5)
    assert isinstance(decision, GiveUp)
    assert "5 times in a row" in decision.reason


def test_a_process_that_was_never_ready_is_not_restarted_long() -> None:
    rule = RestartRule(most_failed_starts=2)
    assert isinstance(rule.decide([1.0, 1.0], was_ready=False), Restart)
    assert isinstance(rule.decide([1.0, 1.0, 30.0], was_ready=False), GiveUp)


def test_one_healthy_incarnation_resets_the_count() -> None:
    assert isinstance(RestartRule(most_quick_deaths=2, healthy_s=10).decide([1, 1, 11, 1, 1]), Restart)


@given(lives=st.lists(st.floats(min_value=20, max_value=1e6), min_size=1, max_size=200))
def test_long_lived_processes_are_restarted_for_ever(lives: list[float]) -> None:
    assert isinstance(RestartRule().decide(lives), Restart)
