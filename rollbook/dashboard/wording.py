"""Figures as short words: numbers, shares, durations, and a series in one line of blocks."""

import itertools
from collections.abc import Sequence

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32


def sparkline(values: Sequence[float | None], width: int = SPARK_WIDTH) -> str:
    """The series in one line of blocks, from its least to its most; each block is the mean of its share of the values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    width = min(width, len(known))
    edges = [round(at * len(known) / width) for at in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def duration(seconds: float | None) -> str:
    """`42s`, `3m20s`, `2h05m`, `-` when unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
