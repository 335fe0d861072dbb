"""Draws the pictures of the README from a run of the demo: `python scripts/readme_pictures.py RUN_DIR`.

The live view is the panel of the terminal at step `SHOWN_STEP`; the learning curve is the plot that every run draws.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console

from rollbook import train
from rollbook.dashboard.run_metrics import RunMetrics
from rollbook.dashboard.terminal import ProcessStatus, ProgressRenderer
from rollbook.run.commands import train as command

ROOT = Path(__file__).parents[1]
SHOWN_STEP = 120


@contextmanager
def recording_view(
    console: Console, renderer: ProgressRenderer
) -> Iterator[Callable[[RunMetrics, Sequence[ProcessStatus]], None]]:
    """In place of the live view: keeps the panel of the first update at or after `SHOWN_STEP`."""
    recorded = False

    def update(metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None:
        nonlocal recorded
        if metrics.last_step >= SHOWN_STEP and not recorded:
            recorded = True
            page = Console(record=True, width=110, file=StringIO(), force_terminal=True)
            page.print(renderer.panel(metrics, processes))
            page.save_svg(str(ROOT / "docs" / "live-view.svg"), title="rollbook demo")

    yield update


def main(run_dir: str) -> None:
    command.open_view = recording_view  # type: ignore[assignment]  # without its options
    report = train(ROOT / "examples" / "01_number_guessing" / "run.toml", run_dir=run_dir, console=Console(stderr=True))
    curve = next(path for path in report.plots if "reward" in path.name)
    shutil.copy(curve, ROOT / "docs" / "learning-curve.png")


if __name__ == "__main__":
    main(sys.argv[1])
