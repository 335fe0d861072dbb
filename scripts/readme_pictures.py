"""Runs the README's example and draws its live view: `python scripts/readme_pictures.py` in an empty directory."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from rollbook.commands.training import train
from rollbook.dashboard.run_metrics import RunMetrics
from rollbook.dashboard.terminal import ProcessStatus, ProgressRenderer

ROOT = Path(__file__).parents[1]
SHOWN_STEP = 30


@contextmanager
def recording_view(
    console: Console, renderer: ProgressRenderer, **options: Any
) -> Iterator[Callable[[RunMetrics, Sequence[ProcessStatus]], None]]:
    """In place of the live view: draws the panel of the first update at or after `SHOWN_STEP`."""
    is_drawn = False

    def update(metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None:
        nonlocal is_drawn
        if metrics.last_step >= SHOWN_STEP and not is_drawn:
            is_drawn = True
            page = Console(record=True, width=110, file=StringIO(), force_terminal=True)
            page.print(renderer.panel(metrics, processes))
            # Without the web fonts: the picture must not load anything.
            svg = re.sub(
                r"\s*@font-face \{.*?\n    \}\n", "\n", page.export_svg(title="rollbook train"), flags=re.DOTALL
            )
            (ROOT / "docs" / "live-view.svg").write_text(svg, encoding="utf-8")

    yield update


if __name__ == "__main__":
    vars(train)["open_view"] = recording_view
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"))
