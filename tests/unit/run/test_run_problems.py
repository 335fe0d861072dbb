"""What processes of a run wait for in vain is said on the console once, and listed in the summary with its seconds."""

import io

from rollbook.run.supervision.problems import SAY_AGAIN_S, ProblemLog
from rollbook.telemetry.events import EventLog


class Console:
    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        log = EventLog("test", echo=io.StringIO())
        self.problems = ProblemLog(log=log, say=self.said.append, now=lambda: self.now)


def test_a_wait_is_said_when_it_begins_and_summed_up_with_its_last_cause() -> None:
    console = Console()
    console.problems.report("trainer", "the ledger", "refused")
    console.problems.report("trainer", "the ledger", "no response\nat line 2")
    console.now = 40.0
    assert console.said == ["trainer waits for the ledger: refused"]
    assert console.problems.summary() == ("trainer waited 40 s for the ledger: no response",)


def test_a_wait_that_returns_again_and_again_does_not_flood_the_console() -> None:
    console = Console()
    for _ in range(20):
        console.problems.report("rollout", "the policy servers", "refused")
        console.now += 1.0
        console.problems.report("rollout", "the policy servers", "")
        console.now += 1.0
    assert len(console.said) == 1
    assert console.problems.summary() == ("rollout waited 20 s for the policy servers: refused",)
    console.now += SAY_AGAIN_S
    console.problems.report("rollout", "the policy servers", "refused")
    assert len(console.said) == 2


def test_the_longest_waits_come_first() -> None:
    console = Console()
    console.problems.report("a", "x", "short")
    console.now = 1.0
    console.problems.report("a", "x", "")
    console.problems.report("b", "y", "long")
    console.now = 9.0
    assert [line.split()[0] for line in console.problems.summary()] == ["b", "a"]


def test_code_that_runs_unconfined_is_said_at_once_and_is_first_in_the_summary() -> None:
    console = Console()
    console.problems.report_unconfined(['env.args.sandbox = "none"'])
    console.problems.report("trainer", "the ledger", "refused")
    text = 'code of the policy runs unconfined, with all rights of its process: env.args.sandbox = "none"'
    assert console.said[0] == text
    assert console.problems.summary()[0] == text
    assert len(console.problems.summary()) == 2
