"""The text formats of Prometheus and OpenMetrics, without a registry or global state; and the lag of an event loop."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollbook.concurrency.clock import Clock

LAG_TICK_S = 0.05
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_CONTENT_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""
    """`_bucket`, `_sum` and `_count` of a histogram."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: `Family("rollbook_ledger_groups", "groups by state", Kind.GAUGE, [Sample(3, {"state": "queued"})])`."""

    name: str
    meaning: str
    kind: Kind
    samples: Iterable[Sample]


class Histogram:
    """Counts values by fixed upper bounds."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(sorted(bounds))
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, value: float) -> None:
        self.total += value
        for at, bound in enumerate(self.bounds):
            if value <= bound:
                self._counts[at] += 1
                return
        self._counts[-1] += 1

    def samples(self, labels: Mapping[str, str] | None = None) -> list[Sample]:
        labels = labels or {}
        below = 0
        buckets = []
        for bound, count in zip((*self.bounds, math.inf), self._counts, strict=True):
            below += count
            buckets.append(Sample(below, {**labels, "le": _number(bound)}, "_bucket"))
        return [*buckets, Sample(self.total, labels, "_sum"), Sample(below, labels, "_count")]


class LoopLag:
    """Measures how late an event loop wakes from a short sleep."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = Histogram(LAG_BOUNDS_S)
        self.worst_s = 0.0

    async def run(self) -> None:
        """Waits: for the clock. Gives: `seconds`, `worst_s`. Ends: on cancellation."""
        while True:
            began = self._clock.now()
            await self._clock.sleep(LAG_TICK_S)
            late = max(0.0, self._clock.now() - began - LAG_TICK_S)
            self.seconds.add(late)
            self.worst_s = max(self.worst_s, late)


def metrics_response(families: Iterable[Family], accept: str | None) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a response to `/metrics`, in the format that the client's `Accept` header requests."""
    is_open = OPENMETRICS in (accept or "")
    content_type = OPENMETRICS_CONTENT_TYPE if is_open else CONTENT_TYPE
    return exposition(families, is_open=is_open).encode(), {"Content-Type": content_type, "Vary": "Accept"}


def exposition(families: Iterable[Family], *, is_open: bool = False) -> str:
    """The response body. `is_open`: in the OpenMetrics format."""
    lines: list[str] = []
    for family in families:
        meaning = family.meaning.replace("\\", r"\\").replace("\n", r"\n")
        # In OpenMetrics the suffix belongs to the samples of a counter, not to its name.
        name = family.name.removesuffix("_total") if is_open and family.kind is Kind.COUNTER else family.name
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{braces} {_number(sample.value)}")
    if is_open:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
