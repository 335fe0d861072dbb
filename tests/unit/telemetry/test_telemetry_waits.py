"""A process reports what it waits for in vain: not at the first failure, and once for each cause; and that it is over."""

from rollbook.telemetry.waits import REPORT_S, Waits


class Heard:
    def __init__(self) -> None:
        self.now = 0.0
        self.reports: list[tuple[str, str]] = []
        self.waits = Waits(now=lambda: self.now)
        self.waits.listen(lambda awaited, cause: self.reports.append((awaited, cause)))


def test_a_failure_that_lasts_is_reported_once_for_each_cause_and_when_it_is_over() -> None:
    heard = Heard()
    heard.waits.failing("the ledger", "refused")
    assert heard.reports == []
    heard.now = REPORT_S
    for cause in ("refused", "refused", "no such host"):
        heard.waits.failing("the ledger", cause)
    heard.waits.recovered("the ledger")
    heard.waits.recovered("the ledger")
    assert heard.reports == [("the ledger", "refused"), ("the ledger", "no such host"), ("the ledger", "")]


def test_failures_that_are_over_at_once_are_not_reported() -> None:
    heard = Heard()
    for _ in range(10):
        heard.waits.failing("the ledger", "refused")
        heard.now += REPORT_S / 2
        heard.waits.recovered("the ledger")
    assert heard.reports == []


def test_a_failure_that_says_all_by_itself_is_reported_at_once() -> None:
    heard = Heard()
    heard.waits.failing("a worker", "it died", at_once=True)
    assert heard.reports == [("a worker", "it died")]
