"""The text format of Prometheus, and the lag of an event loop."""

import asyncio
import math

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rollbook.concurrency.clock import ManualClock
from rollbook.telemetry.prometheus import (
    LAG_TICK_S,
    Family,
    Histogram,
    Kind,
    LoopLag,
    Sample,
    exposition,
    metrics_response,
)


def test_a_family_has_help_type_and_labels() -> None:
    text = exposition(
        [Family("a_total", "how many\nin all", Kind.COUNTER, [Sample(3, {"run": 'x"\\y\n'}), Sample(0.5)])]
    )
    assert text == (
        '# HELP a_total how many\\nin all\n# TYPE a_total counter\na_total{run="x\\"\\\\y\\n"} 3\na_total 0.5\n'
    )


def test_nan_and_infinity_have_their_own_spelling() -> None:
    text = exposition([Family("a", "m", Kind.GAUGE, [Sample(math.nan), Sample(math.inf), Sample(-math.inf)])])
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["NaN", "+Inf", "-Inf"]


def test_a_histogram_counts_everything_below_each_bound() -> None:
    histogram = Histogram([1.0, 0.1])
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.add(value)
    samples = {(sample.suffix, sample.labels.get("le")): sample.value for sample in histogram.samples({"route": "r"})}
    assert samples == {
        ("_bucket", "0.1"): 2,
        ("_bucket", "1"): 3,
        ("_bucket", "+Inf"): 4,
        ("_sum", None): 7.65,
        ("_count", None): 4,
    }


async def test_the_lag_of_a_blocked_loop_is_measured() -> None:
    clock = ManualClock()
    lag = LoopLag(clock)
    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(lag.run())
        await clock.advance(LAG_TICK_S)
        assert (lag.seconds.count, lag.worst_s) == (1, 0.0)
        clock.jump(1.5)
        await clock.advance(LAG_TICK_S)
        assert lag.worst_s > 1.4
        ticking.cancel()


def test_openmetrics_is_sent_on_request_and_its_own_parser_reads_it() -> None:
    histogram = Histogram([0.1, 1.0])
    histogram.add(0.5)
    families = [
        Family("requests_total", "responses", Kind.COUNTER, [Sample(3, {"route": "a"})]),
        Family("seconds", "time", Kind.HISTOGRAM, histogram.samples()),
    ]
    body, headers = metrics_response(families, "application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    read = text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]  # the package leaves it untyped
    parsed = {family.name: family for family in read}
    assert parsed["requests"].samples[0].value == 3
    assert parsed["seconds"].type == "histogram"
    plain, headers = metrics_response(families, "text/plain")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"# TYPE requests_total counter" in plain
