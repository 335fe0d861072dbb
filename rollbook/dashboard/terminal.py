"""What a person sees while a run goes on: a live panel on a terminal, a plain line every few seconds anywhere else.

Both views take the same two things, figures and processes, so that the supervisor need not know which one it has. Nothing here
decides anything about the run. Views write to the console they are given, which is stderr: stdout belongs to results.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollbook.dashboard.figures import ProcessLine, RunFigures
from rollbook.dashboard.wording import duration, number, percent, sparkline

__all__ = ["PlainView", "ProcessLine", "ProgressView", "TerminalView", "open_view"]

STATE_STYLES = {
    "running": "green",
    "starting": "cyan",
    "restarting": "yellow",
    "failed": "bold red",
}
PLAIN_EVERY_S = 5.0


class ProgressView(Protocol):
    """What the supervisor holds: something to update, opened and closed with `with`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, figures: RunFigures, processes: Sequence[ProcessLine]) -> None: ...


def open_view(console: Console, *, title: str, total_steps: int | None, lag_budget: int) -> ProgressView:
    """The live panel where there is a terminal, plain lines where there is none (a pipe, a log file, CI)."""
    kind = TerminalView if console.is_terminal and not console.is_dumb_terminal else PlainView
    return kind(console, title=title, total_steps=total_steps, lag_budget=lag_budget)


class TerminalView:
    """A panel that is drawn over itself."""

    def __init__(self, console: Console, *, title: str, total_steps: int | None, lag_budget: int) -> None:
        self._title = title
        self._total_steps = total_steps
        self._lag_budget = lag_budget
        # Drawn when told, by `update`, and not by a thread of its own: a tick of the supervisor is often enough.
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, figures: RunFigures, processes: Sequence[ProcessLine]) -> None:
        self._live.update(self.render(figures, processes), refresh=True)

    def render(self, figures: RunFigures, processes: Sequence[ProcessLine]) -> RenderableType:
        parts: list[RenderableType] = [self._progress(figures), self._figures(figures)]
        if processes:
            parts += [Text(), _process_table(processes)]
        return Panel(Group(*parts), title=Text(self._title, "bold"), title_align="left", border_style="dim")

    def _progress(self, figures: RunFigures) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(width=16)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        total = self._total_steps
        # Without a number of steps the run ends with its data: there is nothing to measure progress against.
        bar = ProgressBar(total=total, completed=figures.last_step) if total else Text()
        grid.add_row(_step_of(figures, total), bar, _time_left(figures, total))
        return grid

    def _figures(self, figures: RunFigures) -> RenderableType:
        last = figures.latest
        grid = Table.grid(padding=(0, 2))
        grid.add_row("reward", number(last.reward), Text(sparkline([s.reward for s in figures.steps]), "blue"))
        grid.add_row("solved", percent(last.solved), Text(sparkline([s.solved for s in figures.steps]), "green"))
        style = "bold red" if figures.max_lag > self._lag_budget else ""
        grid.add_row("lag", Text(number(last.lag_max, 0), style), f"most {figures.max_lag}, budget {self._lag_budget}")
        grid.add_row("overlap", percent(figures.overlap_ratio), "of the trainer's time is work, the rest is waiting")
        grid.add_row("in flight", number(figures.gauges.get("async/in_flight"), 0), flow(figures))
        return grid


class PlainView:
    """One line every few seconds, without control codes."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        total_steps: int | None,
        lag_budget: int,
        every_s: float = PLAIN_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._total_steps = total_steps
        self._lag_budget = lag_budget
        self._every_s = every_s
        self._now = now
        self._told_at: float | None = None
        self._latest: str | None = None
        self._told: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last state is always told, however short ago a line was.
        if self._latest is not None and self._latest != self._told:
            self._tell(self._latest)

    def update(self, figures: RunFigures, processes: Sequence[ProcessLine]) -> None:
        self._latest = self.render(figures, processes)
        if self._told_at is None or self._now() - self._told_at >= self._every_s:
            self._tell(self._latest)

    def render(self, figures: RunFigures, processes: Sequence[ProcessLine]) -> str:
        last = figures.latest
        line = (
            f"{self._title}: {_step_of(figures, self._total_steps)}"
            f"  reward {number(last.reward)}  solved {percent(last.solved)}"
            f"  lag {number(last.lag_max, 0)}/{self._lag_budget}  overlap {percent(figures.overlap_ratio)}"
            f"  {_time_left(figures, self._total_steps)}"
        )
        unusual = [f"{p.name} {p.state}" for p in processes if p.state != "running"]
        return line + (f"  [{', '.join(unusual)}]" if unusual else "")

    def _tell(self, line: str) -> None:
        self._told_at, self._told = self._now(), line
        # Straight to the file: no wrapping at the width of a terminal that is not there.
        self._console.file.write(line + "\n")
        self._console.file.flush()


def _process_table(processes: Sequence[ProcessLine]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("process", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    table.add_column("doing", ratio=1, no_wrap=True, overflow="ellipsis")
    for line in processes:
        table.add_row(
            Text(line.name),
            "-" if line.pid is None else str(line.pid),
            Text(line.state, STATE_STYLES.get(line.state, "")),
            duration(line.since_s),
            str(line.restarts) if line.restarts else "",
            Text(line.doing),
        )
    return table


def _step_of(figures: RunFigures, total: int | None) -> str:
    return f"step {figures.last_step}/{total}" if total else f"step {figures.last_step}"


def _time_left(figures: RunFigures, total: int | None) -> str:
    pace = figures.seconds_per_step
    if total is None:
        return "" if pace is None else f"{pace:.2f}s a step"
    return f"{duration(figures.eta_s(total))} left"


def flow(figures: RunFigures) -> str:
    """Where groups and tokens are: what is queued, what the trainer eats, what the engines make."""
    parts = []
    for label, key in (("queued", "ledger/queued_groups"), ("room for", "async/staleness_capacity")):
        if key in figures.gauges:
            parts.append(f"{label} {number(figures.gauges[key], 0)}")
    if figures.gauges.get("fairness/biased_measures"):
        worst = max(("tokens", "seconds", "reward"), key=lambda m: figures.gauges.get(f"fairness/ks_{m}", 0.0))
        parts.append(f"trained groups are unlike the dispatched in {worst}")
    if figures.tokens_per_s:
        parts.append(f"{number(figures.tokens_per_s, 0)} tokens/s trained")
    return ", ".join(parts)
