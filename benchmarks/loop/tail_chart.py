"""Draws the report of `tail.py`: speed over the shape of the durations, one panel per staleness bound.

Points are means of the measured runs, bars their range, lines the simulation.
"""

import argparse
import statistics
import sys
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Chart

from benchmarks.loop.tail import REPORT, Cell, read_report

COLOURS = {"wait": "#b3382c", "drop": "#d9a441", "trim": "#3b6ea8", "parts": "#2f8f5b"}


def draw(path: Path, cells: list[Cell]) -> None:
    bounds = sorted({cell.plan.load.max_head_offpolicy_versions for cell in cells})
    chart = Chart(figsize=(3.6 * len(bounds) + 1.4, 3.4), layout="constrained")
    FigureCanvasSVG(chart)
    for number, bound in enumerate(bounds):
        axes = chart.add_subplot(1, len(bounds), number + 1)
        for policy, colour in COLOURS.items():
            own = [
                c for c in cells if c.plan.load.max_head_offpolicy_versions == bound and c.plan.policy.value == policy
            ]
            shapes = sorted({cell.plan.load.shape for cell in own})
            runs = [[cell.measured for cell in own if cell.plan.load.shape == shape] for shape in shapes]
            speeds = [statistics.fmean(one.speed for one in same) for same in runs]
            below = [mean - min(one.speed for one in same) for mean, same in zip(speeds, runs, strict=True)]
            above = [max(one.speed for one in same) - mean for mean, same in zip(speeds, runs, strict=True)]
            lines = [statistics.fmean(one.simulated.speed for one in same) for same in runs]
            axes.plot(shapes, lines, color=colour, linewidth=1.2, alpha=0.6)
            axes.errorbar(
                shapes, speeds, yerr=(below, above), fmt="o", color=colour, markersize=5, elinewidth=1, label=policy
            )
        axes.set_title(f"staleness bound {bound}", loc="left", fontsize=10)
        axes.set_xlabel("shape of the episode times")
        axes.set_ylim(0, 1.4)
        axes.grid(color="#dddddd", linewidth=0.6)
    chart.axes[0].set_ylabel("speed (1: the ideal loop)")
    chart.axes[0].legend(loc="lower left", frameon=False, fontsize=9)
    chart.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the report")
    folder = parser.parse_args().folder
    cells = read_report(folder / REPORT)
    if not cells:
        parser.error(f"{folder / REPORT} has no runs; `python -m benchmarks.loop.tail --out {folder}` measures them")
    draw(folder / "tail.svg", cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
