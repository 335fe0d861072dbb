"""Output of the benchmarks: readable lines on stderr, and one JSON object as the last line on stdout."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Our value, the peer's value from the same benchmark run, and their ratio. A larger ratio is better."""

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    floor: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.floor is None or self.ratio >= self.floor


def print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_figures(figures: Sequence[Figure], **context: Any) -> int:
    """Print the last line. Returns the exit code: 0 if every ratio reaches its floor."""
    rows = []
    for figure in figures:
        row = asdict(figure)
        more = row.pop("more")
        rows.append({**row, **more, "ok": figure.ok})
        print_status(
            f"{figure.name:<24} ours {figure.ours:>10.3f}  peer {figure.peer:>10.3f} {figure.unit:<10} ratio {figure.ratio:.3f}"
        )
    print(json.dumps({"figures": rows, "machine": machine(), **context}))
    return 0 if all(figure.ok for figure in figures) else 1


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpus": os.cpu_count(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit.stdout.strip() or None,
    }
