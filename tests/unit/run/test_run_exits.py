"""What follows from the exit of a process: it has ended, the run ends or continues without it, or it is restarted."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.run.supervision.exits import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FENCED,
    EXIT_NO_MEMORY,
    EXIT_STOP_RUN,
    ExitAction,
    GiveUp,
    ProcessExit,
    Restart,
    RestartRule,
    judge,
)


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


def test_a_process_that_waits_without_progress_and_dies_is_given_up() -> None:
    """A trainer that waits 600 s for a publication is not healthy, however long it waited."""
    rule = RestartRule(most_idle_lives=2, idle_s=60)
    waited = [600.0, 600.0, 600.0]
    assert isinstance(rule.decide(waited[:2], has_progressed=[False, False]), Restart)
    decision = rule.decide(waited, has_progressed=[False, False, False])
    assert isinstance(decision, GiveUp)
    assert decision.reason == "it died 3 times without progress, after 1800 s in all"
    assert isinstance(rule.decide(waited, has_progressed=[False, True, False]), Restart), "one life trained a step"


def test_a_process_that_is_killed_before_each_first_step_is_given_up_like_one_that_cannot_start() -> None:
    rule = RestartRule(most_quick_deaths=4, healthy_s=15, idle_s=60)
    assert isinstance(rule.decide([30.0] * 4, has_progressed=[False] * 4), Restart)
    decision = rule.decide([30.0] * 5, has_progressed=[False] * 5)
    assert isinstance(decision, GiveUp)
    assert "or without progress" in decision.reason


KILLED = -signal.SIGKILL
QUICK_DEATHS = (0.5,) * 10


@pytest.mark.parametrize(
    ("ended", "action", "sentence"),
    [
        pytest.param(
            ProcessExit(code=KILLED, lost="base", lifetimes_s=(0.0,) * 9, was_ready=False),
            ExitAction.RESTART,
            "was ended, because the process that owns its base died",
            id="it mapped weights of a process that died",
        ),
        pytest.param(
            ProcessExit(code=EXIT_FENCED, lost="base"),
            ExitAction.FAIL_RUN,
            "stopped the run: another trainer took over this run",
            id="a trainer that lost its base was fenced",
        ),
        pytest.param(ProcessExit(code=KILLED, has_ended=True, lost="base"), ExitAction.END, "", id="it ended before"),
        pytest.param(ProcessExit(code=EXIT_DONE), ExitAction.END, "", id="it ended with code 0"),
        pytest.param(ProcessExit(code=KILLED, has_ended=True), ExitAction.END, "", id="it was killed after its work"),
        pytest.param(
            ProcessExit(code=EXIT_DONE, was_stopped=True, is_last=True, is_draining=True),
            ExitAction.END,
            "",
            id="the trainer stopped on request",
        ),
        pytest.param(
            ProcessExit(code=EXIT_DONE, was_stopped=True, is_draining=True),
            ExitAction.RESTART,
            "was stopped by another program (SIGTERM)",
            id="a server got SIGTERM while the trainer drains",
        ),
        pytest.param(
            ProcessExit(code=EXIT_DONE, was_stopped=True, is_last=True),
            ExitAction.RESTART,
            "was stopped by another program (SIGTERM)",
            id="the trainer got SIGTERM from another program",
        ),
        pytest.param(
            ProcessExit(code=KILLED, is_last=True, is_draining=True, is_interrupted=True),
            ExitAction.ABORT_DRAIN,
            "",
            id="the trainer died while a person waits for it",
        ),
        pytest.param(
            ProcessExit(code=KILLED, is_last=True, is_draining=True),
            ExitAction.RESTART,
            "was killed by signal 9 (SIGKILL)",
            id="the trainer died while an operator drains the run",
        ),
        pytest.param(
            ProcessExit(code=EXIT_STOP_RUN, fault="no such reward"),
            ExitAction.FAIL_RUN,
            "stopped the run: no such reward",
            id="it reported a fault",
        ),
        pytest.param(
            ProcessExit(code=EXIT_STOP_RUN, is_optional=True),
            ExitAction.DROP,
            "stopped: it reported no reason",
            id="the evaluation stopped without a reason",
        ),
        pytest.param(
            ProcessExit(code=EXIT_NO_MEMORY, fault="out of memory while loading the model", was_ready=False),
            ExitAction.FAIL_RUN,
            "stopped the run: out of memory while loading the model",
            id="it has never had enough memory",
        ),
        pytest.param(
            ProcessExit(code=EXIT_NO_MEMORY, fault="out of memory", lifetimes_s=(90.0,)),
            ExitAction.RESTART,
            "exited with status 4: out of memory",
            id="it ran out of memory after a while",
        ),
        pytest.param(
            ProcessExit(code=EXIT_NO_MEMORY, fault="out of memory", lifetimes_s=(90.0, 0.0)),
            ExitAction.RESTART,
            "exited with status 4: out of memory",
            id="the memory of the one before was not free yet",
        ),
        pytest.param(
            ProcessExit(code=EXIT_NO_MEMORY, fault="out of memory", lifetimes_s=(90.0, 0.0, 0.0)),
            ExitAction.FAIL_RUN,
            "stopped the run: out of memory",
            id="there is no memory for it any more",
        ),
        pytest.param(
            ProcessExit(code=EXIT_NO_MEMORY, fault="x", lifetimes_s=(90.0,), has_progressed=(False,)),
            ExitAction.FAIL_RUN,
            "stopped the run: x",
            id="it ran out of memory before it trained a step",
        ),
        pytest.param(
            ProcessExit(code=EXIT_FENCED, is_last=True),
            ExitAction.FAIL_RUN,
            "stopped the run: another trainer took over this run",
            id="another trainer took over",
        ),
        pytest.param(
            ProcessExit(code=1, fault="out of memory\ntraceback"),
            ExitAction.RESTART,
            "exited with status 1: out of memory",
            id="it crashed",
        ),
        pytest.param(
            ProcessExit(code=1, lifetimes_s=QUICK_DEATHS),
            ExitAction.FAIL_RUN,
            "exited with status 1; it died 10 times in a row within 15 s of being ready",
            id="it crashes again and again",
        ),
        pytest.param(
            ProcessExit(code=1, lifetimes_s=QUICK_DEATHS, is_optional=True),
            ExitAction.DROP,
            "exited with status 1; it died 10 times in a row within 15 s of being ready",
            id="the evaluation crashes again and again",
        ),
    ],
)
def test_an_exit_has_one_consequence(ended: ProcessExit, action: ExitAction, sentence: str) -> None:
    verdict = judge(ended, RestartRule())
    assert (verdict.action, verdict.sentence) == (action, sentence)
    has_crashed = ended.code == EXIT_CRASHED and not ended.was_stopped
    assert verdict.shows_output == (ended.lifetimes_s == QUICK_DEATHS or has_crashed), "its last words explain it"
