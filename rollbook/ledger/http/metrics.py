"""The ledger's numbers for Prometheus: every run at a glance, the requests, and how long the event loop made others wait."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rollbook.contracts.admission import LedgerStatus
from rollbook.telemetry.loop_lag import LoopLag
from rollbook.telemetry.prometheus import Family, Histogram, Kind, Sample, exposition

REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class RequestNumbers:
    """Counts what one server answered."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        self._answers[route, status] += 1
        histogram = self._seconds.get(route)
        if histogram is None:
            histogram = self._seconds[route] = Histogram(REQUEST_BOUNDS_S)
        histogram.add(seconds)

    def families(self) -> Iterable[Family]:
        yield Family(
            "rollbook_ledger_requests_total",
            "answers by route and status",
            Kind.COUNTER,
            [
                Sample(n, {"route": route, "status": str(status)})
                for (route, status), n in sorted(self._answers.items())
            ],
        )
        yield Family(
            "rollbook_ledger_request_seconds",
            "seconds from the request's headers to its answer, waiting calls included",
            Kind.HISTOGRAM,
            [s for route, seconds in sorted(self._seconds.items()) for s in seconds.samples({"route": route})],
        )


def ledger_metrics(
    statuses: Sequence[LedgerStatus], *, requests: RequestNumbers, lag: LoopLag, receiving: int, received: int
) -> str:
    """The whole answer to `/metrics`."""
    return exposition([*_runs(statuses), *requests.families(), *_server(lag, receiving, received)])


def _runs(statuses: Sequence[LedgerStatus]) -> Iterable[Family]:
    def of_each(name: str, meaning: str, value: str, kind: Kind = Kind.GAUGE) -> Family:
        found = [Sample(number, {"run": s.run_id}) for s in statuses if (number := getattr(s, value)) is not None]
        return Family(f"rollbook_ledger_{name}", meaning, kind, found)

    yield Family(
        "rollbook_ledger_groups",
        "groups by state",
        Kind.GAUGE,
        [Sample(n, {"run": s.run_id, "state": state}) for s in statuses for state, n in s.by_state.items()],
    )
    yield Family(
        "rollbook_ledger_dropped_groups_total",
        "dropped groups by reason",
        Kind.COUNTER,
        [Sample(n, {"run": s.run_id, "reason": kind}) for s in statuses for kind, n in sorted(s.dropped.items())],
    )
    yield of_each("opened_groups_total", "groups that were opened", "opened", Kind.COUNTER)
    yield of_each("queued_bytes", "payload bytes of the queued groups", "queued_bytes")
    yield of_each("gate_capacity", "groups that may begin now", "capacity")
    yield of_each("policy_version", "step of the last confirmed publication", "version")
    yield of_each("trainer_epoch", "how often the trainer's role was taken", "epoch")
    yield of_each("acknowledged_step", "last trained step", "acknowledged_step")
    yield of_each("durable_step", "last step that a checkpoint covers", "durable_step")


def _server(lag: LoopLag, receiving: int, received: int) -> Iterable[Family]:
    yield Family(
        "rollbook_ledger_receiving_bytes", "bytes of requests that are arriving", Kind.GAUGE, [Sample(receiving)]
    )
    yield Family("rollbook_ledger_received_bytes_total", "bytes of bodies, unpacked", Kind.COUNTER, [Sample(received)])
    yield Family(
        "rollbook_ledger_loop_lag_seconds",
        "how much too late the event loop woke",
        Kind.HISTOGRAM,
        lag.seconds.samples(),
    )
    yield Family("rollbook_ledger_loop_lag_worst_seconds", "the worst of it", Kind.GAUGE, [Sample(lag.worst_s)])
