"""The restart rule: patient with the unlucky, firm with what cannot stand up."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.run.supervision.restarts import GiveUp, Restart, RestartRule


def test_the_first_restart_is_immediate_and_the_delays_grow() -> None:
    rule = RestartRule(most_quick_deaths=4, healthy_s=10, first_wait_s=0.2, most_wait_s=1.0)
    waits = [rule.decide([1.0] * deaths) for deaths in (1, 2, 3, 4)]
    assert waits == [Restart(0.2), Restart(0.4), Restart(0.8), Restart(1.0)]


def test_repeated_quick_deaths_stop_the_run() -> None:
    verdict = RestartRule(most_quick_deaths=4, healthy_s=10).decide([1.0] * 5)
    assert isinstance(verdict, GiveUp)
    assert "5 times in a row" in verdict.reason


def test_a_process_that_was_never_ready_is_not_restarted_long() -> None:
    rule = RestartRule(most_failed_starts=2)
    assert isinstance(rule.decide([1.0, 1.0], was_ready=False), Restart)
    assert isinstance(rule.decide([1.0, 1.0, 30.0], was_ready=False), GiveUp)


def test_a_long_life_resets_the_count_of_quick_deaths() -> None:
    assert isinstance(RestartRule(most_quick_deaths=2, healthy_s=10).decide([1, 1, 11, 1, 1]), Restart)


@given(lives=st.lists(st.floats(min_value=20, max_value=1e6), min_size=1, max_size=200))
def test_long_lived_processes_are_always_restarted(lives: list[float]) -> None:
    assert isinstance(RestartRule().decide(lives), Restart)
