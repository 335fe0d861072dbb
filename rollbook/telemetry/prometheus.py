"""The text that Prometheus reads: families of numbers with labels. No registry and no globals: whoever is asked builds it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    """Counts by upper bound. Bounds are fixed at birth, so that every process counts alike."""

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
        found = []
        for bound, count in zip((*self.bounds, math.inf), self._counts, strict=True):
            below += count
            found.append(Sample(below, {**labels, "le": _number(bound)}, "_bucket"))
        return [*found, Sample(self.total, labels, "_sum"), Sample(below, labels, "_count")]


def exposition(families: Iterable[Family]) -> str:
    """The whole answer, one family after the other."""
    lines: list[str] = []
    for family in families:
        meaning = family.meaning.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {meaning}", f"# TYPE {family.name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
            told = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{told} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
