"""The ledger's metrics for Prometheus: runs, requests, and the lag of the event loop."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rollbook.contracts.admission import LedgerStatus
from rollbook.telemetry.prometheus import Family, Histogram, Kind, LoopLag, Sample

REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class RequestMetrics:
    """Counts the responses of one server and their durations."""

    def __init__(self) -> None:
        self._responses: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        self._responses[route, status] += 1
        histogram = self._seconds.get(route)
        if histogram is None:
            histogram = self._seconds[route] = Histogram(REQUEST_BOUNDS_S)
        histogram.add(seconds)

    def families(self) -> Iterable[Family]:
        yield Family(
            "rollbook_ledger_requests_total",
            "responses by route and status",
            Kind.COUNTER,
            [
                Sample(n, {"route": route, "status": str(status)})
                for (route, status), n in sorted(self._responses.items())
            ],
        )
        yield Family(
            "rollbook_ledger_request_seconds",
            "seconds from the headers of a request to its response, long polls included",
            Kind.HISTOGRAM,
            [s for route, seconds in sorted(self._seconds.items()) for s in seconds.samples({"route": route})],
        )


def ledger_metrics(
    statuses: Sequence[LedgerStatus], *, requests: RequestMetrics, lag: LoopLag, receiving: int, received: int
) -> list[Family]:
    """The metrics in the response to `/metrics`."""
    return [*_runs(statuses), *requests.families(), *_server(lag, receiving, received)]


def _runs(statuses: Sequence[LedgerStatus]) -> Iterable[Family]:
    def per_run(name: str, description: str, field: str, kind: Kind = Kind.GAUGE) -> Family:
        found = [Sample(number, {"run": s.run_id}) for s in statuses if (number := getattr(s, field)) is not None]
        return Family(f"rollbook_ledger_{name}", description, kind, found)

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
    yield Family(
        "rollbook_ledger_samples",
        "samples with batch policy parts: open, stored or missing",
        Kind.GAUGE,
        [
            Sample(n, {"run": s.run_id, "state": state})
            for s in statuses
            if s.samples is not None
            for state, n in (
                ("open", s.samples.open),
                ("stored", s.samples.stored),
                ("missing", sum(s.samples.missing.values())),
            )
        ],
    )
    yield per_run("opened_groups_total", "opened groups", "opened", Kind.COUNTER)
    yield per_run("unusable_groups_total", "batched groups that the trainer could not train", "unusable", Kind.COUNTER)
    yield per_run("queued_bytes", "payload bytes of the queued groups", "queued_bytes")
    yield per_run("gate_capacity", "groups that may start now", "capacity")
    yield per_run("policy_version", "step of the last confirmed publication", "version")
    yield per_run("trainer_epoch", "how often the trainer role was taken", "epoch")
    yield per_run("acknowledged_step", "last trained step", "acknowledged_step")
    yield per_run("durable_step", "last step covered by a checkpoint", "durable_step")


def _server(lag: LoopLag, receiving: int, received: int) -> Iterable[Family]:
    yield Family(
        "rollbook_ledger_receiving_bytes", "bytes of request bodies in transit", Kind.GAUGE, [Sample(receiving)]
    )
    yield Family(
        "rollbook_ledger_received_bytes_total", "decompressed bytes of request bodies", Kind.COUNTER, [Sample(received)]
    )
    yield Family(
        "rollbook_ledger_loop_lag_seconds",
        "delay of the event loop",
        Kind.HISTOGRAM,
        lag.seconds.samples(),
    )
    yield Family(
        "rollbook_ledger_loop_lag_worst_seconds", "largest delay of the event loop", Kind.GAUGE, [Sample(lag.worst_s)]
    )
