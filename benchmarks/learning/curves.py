"""Plots learning curves if matplotlib is installed. The values are stored as JSON in any case.

python -m benchmarks.learning.curves docs/results/learning/learning.json
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import print_status


def plot(path: Path, runs: Sequence[Mapping[str, Any]], *, mark: float, x_label: str = "seconds of training") -> None:
    """Plot held-out accuracy over time, one line for each run. Synchronous runs are dashed."""
    if importlib.util.find_spec("matplotlib") is None:
        print_status("no plot: matplotlib is not installed; plot later with python -m benchmarks.learning.curves")
        return
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4.6), layout="constrained")
    canvas(figure)
    axes = figure.subplots()
    for run in runs:
        style = "--" if run["name"].startswith("sync") else ":" if run["name"].startswith("harder") else "-"
        axes.plot(
            [at for _, at, _ in run["curve"]],
            [solved for _, _, solved in run["curve"]],
            style,
            marker=".",
            label=run["name"],
        )
    axes.axhline(mark, color="#dddddd", zorder=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel("greedy accuracy on held-out questions")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FILE.json", help="curves that a benchmark of learning wrote")
    source = parser.parse_args().source
    saved = json.loads(source.read_text(encoding="utf-8"))
    plot(source.parent / "learning.png", saved["runs"], mark=saved["mark"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
