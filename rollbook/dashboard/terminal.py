"""Shows the progress of a run: a live panel on a terminal, otherwise a plain line every few seconds.

Both views receive the same metrics and process states, so the supervisor does not know which one it has. Views write to stderr;
stdout is for results.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollbook.dashboard.run_metrics import RunMetrics

STATE_STYLES = {"running": "green", "starting": "cyan", "restarting": "yellow", "failed": "bold red"}
PLAIN_INTERVAL_S = 5.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process, as the supervisor sees it."""

    name: str
    pid: int | None
    state: str
    """waiting, starting, running, restarting, ended, stopped, failed."""
    restarts: int = 0
    doing: str = ""
    since_s: float = 0.0
    """Seconds in this state."""


class ProgressView(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None: ...


def open_view(
    console: Console, *, title: str, total_steps: int | None, max_head_offpolicy_versions: int
) -> ProgressView:
    """The live panel on a terminal, plain lines elsewhere (a pipe, a log file, CI)."""
    kind = TerminalView if console.is_terminal and not console.is_dumb_terminal else PlainView
    return kind(console, title=title, total_steps=total_steps, max_head_offpolicy_versions=max_head_offpolicy_versions)


class TerminalView:
    """A panel that is redrawn in place."""

    def __init__(
        self, console: Console, *, title: str, total_steps: int | None, max_head_offpolicy_versions: int
    ) -> None:
        self._title = title
        self._total_steps = total_steps
        self._max_lag = max_head_offpolicy_versions
        # `update` redraws. The supervisor calls it often enough, so no refresh thread is needed.
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None:
        self._live.update(self.render(metrics, processes), refresh=True)

    def render(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> RenderableType:
        parts: list[RenderableType] = [self._progress(metrics), self._metrics(metrics)]
        if processes:
            parts += [Text(), _process_table(processes)]
        return Panel(Group(*parts), title=Text(self._title, "bold"), title_align="left", border_style="dim")

    def _progress(self, metrics: RunMetrics) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(width=16)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        total = self._total_steps
        # Without `max_steps` the run ends with its tasks, and its progress is unknown.
        bar = ProgressBar(total=total, completed=metrics.last_step) if total else Text()
        grid.add_row(_step_text(metrics, total), bar, _time_left(metrics, total))
        return grid

    def _metrics(self, metrics: RunMetrics) -> RenderableType:
        last = metrics.latest
        grid = Table.grid(padding=(0, 2))
        grid.add_row("reward", number(last.reward), Text(sparkline([s.reward for s in metrics.steps]), "blue"))
        grid.add_row("solved", percent(last.solved), Text(sparkline([s.solved for s in metrics.steps]), "green"))
        style = "bold red" if metrics.max_lag > self._max_lag else ""
        grid.add_row("lag", Text(number(last.lag_max, 0), style), f"max {metrics.max_lag}, bound {self._max_lag}")
        grid.add_row("trainer busy", percent(metrics.trainer_utilisation), "of the time; otherwise waiting for groups")
        grid.add_row("in flight", number(metrics.gauges.get("async/in_flight"), 0), flow(metrics))
        return grid


class PlainView:
    """One line every few seconds, without control codes."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        total_steps: int | None,
        max_head_offpolicy_versions: int,
        interval_s: float = PLAIN_INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._total_steps = total_steps
        self._max_lag = max_head_offpolicy_versions
        self._interval_s = interval_s
        self._now = now
        self._printed_at: float | None = None
        self._printed: str | None = None
        self._latest: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._latest is not None and self._latest != self._printed:
            self._print(self._latest)

    def update(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None:
        self._latest = self.render(metrics, processes)
        if self._printed_at is None or self._now() - self._printed_at >= self._interval_s:
            self._print(self._latest)

    def render(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> str:
        last = metrics.latest
        line = (
            f"{self._title}: {_step_text(metrics, self._total_steps)}"
            f"  reward {number(last.reward)}  solved {percent(last.solved)}"
            f"  lag {number(last.lag_max, 0)}/{self._max_lag}  trainer busy {percent(metrics.trainer_utilisation)}"
            f"  {_time_left(metrics, self._total_steps)}"
        )
        unusual = [f"{p.name} {p.state}" for p in processes if p.state != "running"]
        return line + (f"  [{', '.join(unusual)}]" if unusual else "")

    def _print(self, line: str) -> None:
        self._printed_at, self._printed = self._now(), line
        # Write to the file directly: `Console.print` would wrap the line.
        self._console.file.write(line + "\n")
        self._console.file.flush()


def _process_table(processes: Sequence[ProcessStatus]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("process", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    table.add_column("doing", ratio=1, no_wrap=True, overflow="ellipsis")
    for process in processes:
        table.add_row(
            Text(process.name),
            "-" if process.pid is None else str(process.pid),
            Text(process.state, STATE_STYLES.get(process.state, "")),
            duration(process.since_s),
            str(process.restarts) if process.restarts else "",
            Text(process.doing),
        )
    return table


def _step_text(metrics: RunMetrics, total: int | None) -> str:
    return f"step {metrics.last_step}/{total}" if total else f"step {metrics.last_step}"


def _time_left(metrics: RunMetrics, total: int | None) -> str:
    pace = metrics.seconds_per_step
    if total is None:
        return "" if pace is None else f"{pace:.2f}s a step"
    return f"{duration(metrics.eta_s(total))} left"


def flow(metrics: RunMetrics) -> str:
    """Queued groups, free capacity, selection bias and token rate, as far as they are known."""
    parts = []
    for label, key in (("queued", "ledger/queued_groups"), ("capacity", "async/staleness_capacity")):
        if key in metrics.gauges:
            parts.append(f"{label} {number(metrics.gauges[key], 0)}")
    if metrics.gauges.get("fairness/biased_measures"):
        worst = max(("tokens", "seconds", "reward"), key=lambda m: metrics.gauges.get(f"fairness/ks_{m}", 0.0))
        parts.append(f"trained groups differ from dispatched groups in {worst}")
    if metrics.tokens_per_s:
        parts.append(f"{number(metrics.tokens_per_s, 0)} tokens/s trained")
    return ", ".join(parts)


def sparkline(values: Sequence[float | None], width: int = SPARK_WIDTH) -> str:
    """The series as blocks, scaled from its minimum to its maximum. Each block is the mean of its share of the values."""
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
    """`42s`, `3m20s`, `2h05m`, or `-` when unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
