"""Shows the progress of a run on stderr: a live panel on a terminal, otherwise a plain line every few seconds."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollbook.dashboard.run_metrics import EvaluationPoint, RunMetrics, StepMetrics, Transcript

STATE_STYLES = {"running": "green", "starting": "cyan", "restarting": "yellow", "failed": "bold red"}
PLAIN_INTERVAL_S = 5.0
UNCHANGED_INTERVAL_S = 60.0
"""A line that says nothing new is repeated this often, as a sign of life."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
SHOWN_MESSAGES = 2
"""Last messages of a transcript in the panel."""
TRANSCRIPT_CHARS = 300
CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "\ufffd")
"""Control characters in the text of a model or an environment, which would control the terminal."""


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
    problems: tuple[str, ...] = ()
    """What it waits for in vain, and why."""

    @property
    def text(self) -> str:
        """What it does, or why it waits, in one line."""
        return "; ".join(text.partition("\n")[0] for text in (self.problems or (self.doing,))).translate(CONTROLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRenderer:
    """Renders the state of a run as a panel or as one line."""

    title: str
    total_steps: int | None
    """None: the run ends with its tasks, and its progress is unknown."""
    max_head_offpolicy_versions: int
    has_evaluation: bool = True
    """Whether the run evaluates held-out tasks during training."""

    def panel(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> RenderableType:
        restarts = sum(process.restarts for process in processes)
        parts: list[RenderableType] = [self._progress(metrics), self._metrics(metrics, restarts)]
        if metrics.transcript is not None:
            lines = transcript_lines(metrics.transcript)
            parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]
        if processes:
            parts += [Text(), _process_table(processes)]
        return Panel(Group(*parts), title=Text(self.title, "bold"), title_align="left", border_style="dim")

    def line(self, metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> str:
        last = metrics.latest
        if metrics.last_step == 0 and processes:
            return f"{self.title}: {self._step(metrics)}  {startup(processes)}"
        line = (
            f"{self.title}: {self._step(metrics)}  reward {number(last.reward)}{_solved_text(last)}"
            f"  lag {number(last.lag_max, 0)}/{self.max_head_offpolicy_versions}"
            f"  trainer busy {percent(metrics.trainer_utilisation)}  {self._time_left(metrics)}"
        )
        if metrics.evaluation is not None:
            line += f"  held out {headline(metrics.evaluation)} at step {metrics.evaluation.step}"
        if metrics.totals.worker_deaths:
            line += f"  worker deaths {metrics.totals.worker_deaths:.0f}"
        unusual = [f"{p.name} {p.state}" for p in processes if p.state != "running"]
        unusual += [f"{p.name} {p.text}" for p in processes if p.problems]
        return line + (f"  [{', '.join(unusual)}]" if unusual else "")

    def _progress(self, metrics: RunMetrics) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(width=16)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        bar = ProgressBar(total=self.total_steps, completed=metrics.last_step) if self.total_steps else Text()
        grid.add_row(self._step(metrics), bar, self._time_left(metrics))
        return grid

    def _metrics(self, metrics: RunMetrics, restarts: int) -> RenderableType:
        last, bound, totals = metrics.latest, self.max_head_offpolicy_versions, metrics.totals
        grid = Table.grid(padding=(0, 2))
        grid.add_row("reward", number(last.reward), Text(sparkline([s.reward for s in metrics.steps]), "blue"))
        if not metrics.steps or any(step.solved is not None for step in metrics.steps):
            grid.add_row("solved", percent(last.solved), Text(sparkline([s.solved for s in metrics.steps]), "green"))
        held_out = metrics.evaluation
        if not self.has_evaluation:
            grid.add_row("held out", "-", "not evaluated: evaluation.every_steps is not set")
        else:
            grid.add_row("held out", headline(held_out), evaluation_text(held_out))
        grid.add_row(
            "response",
            number(last.response_tokens, 0),
            f"tokens; {percent(last.truncated)} truncated, {percent(totals.unscorable_share)} unscorable",
        )
        divergence = "the initial policy" if last.reference_kl is not None else "the sampler"
        grid.add_row("entropy", number(last.entropy, 2), f"KL to {divergence} {small_number(last.kl)}")
        grid.add_row(
            "groups",
            number(totals.groups, 0),
            f"played; {percent(totals.filtered_share)} filtered, {percent(totals.failed_share)} failed",
        )
        style = "bold red" if metrics.max_lag > bound else ""
        grid.add_row("lag", Text(number(last.lag_max, 0), style), f"max {metrics.max_lag}, bound {bound}")
        grid.add_row("trainer busy", percent(metrics.trainer_utilisation), "of the time; otherwise waiting for groups")
        grid.add_row("in flight", number(metrics.gauges.get("async/in_flight"), 0), flow(metrics))
        for problem in metrics.problems:
            grid.add_row(Text("problem", "bold yellow"), "", Text(problem))
        if restarts or totals.worker_deaths:
            grid.add_row("deaths", number(totals.worker_deaths, 0), f"of workers; {restarts} restarts of processes")
        return grid

    def _step(self, metrics: RunMetrics) -> str:
        return f"step {metrics.last_step}" + (f"/{self.total_steps}" if self.total_steps else "")

    def _time_left(self, metrics: RunMetrics) -> str:
        if self.total_steps is None:
            pace = metrics.seconds_per_step
            return "" if pace is None else f"{pace:.2f}s a step"
        return f"{duration(metrics.eta_s(self.total_steps))} left"


@contextmanager
def open_view(
    console: Console,
    renderer: ProgressRenderer,
    *,
    interval_s: float = PLAIN_INTERVAL_S,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[RunMetrics, Sequence[ProcessStatus]], None]]:
    """Yield a function that shows a state: in a live panel on a terminal, in plain lines elsewhere (a pipe, a log file, CI).

    Plain lines are printed at most every `interval_s`, and rarely if they say nothing new; the last state is always printed.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        # Redrawn by each update. They come often enough, so no refresh thread is needed.
        with Live(console=console, auto_refresh=False) as live:
            yield lambda metrics, processes: live.update(renderer.panel(metrics, processes), refresh=True)
        return
    latest, printed, printed_at, transcript_at, num_problems = "", "", -math.inf, 0.0, 0

    def print_latest() -> None:
        nonlocal printed, printed_at
        printed, printed_at = latest, now()
        write(latest)

    def write(line: str) -> None:
        # Write to the file directly: `Console.print` would wrap the line.
        console.file.write(line + "\n")
        console.file.flush()

    def update(metrics: RunMetrics, processes: Sequence[ProcessStatus]) -> None:
        nonlocal latest, transcript_at, num_problems
        for problem in metrics.problems[num_problems:]:
            write(f"warning: {problem}")
        num_problems = len(metrics.problems)
        if metrics.transcript is not None and metrics.transcript.time > transcript_at:
            transcript_at = metrics.transcript.time
            write("\n".join(transcript_lines(metrics.transcript)))
        latest = renderer.line(metrics, processes)
        if now() - printed_at >= (interval_s if latest != printed else max(interval_s, UNCHANGED_INTERVAL_S)):
            print_latest()

    try:
        yield update
    finally:
        if latest != printed:
            print_latest()


def printable(text: str) -> str:
    """Text of other programs, without the characters that would control the terminal."""
    return "\n".join(line.translate(CONTROLS) for line in text.splitlines())


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
            Text(process.text, "yellow" if process.problems else ""),
        )
    return table


def startup(processes: Sequence[ProcessStatus]) -> str:
    """What each process does or waits for: `policy, trainer: loading the model; rollout: starting workers`."""
    by_text: dict[str, list[str]] = {}
    for process in processes:
        waits = f"waiting {process.text}" if process.state == "waiting" else process.text or process.state
        by_text.setdefault(waits, []).append(process.name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())


def _solved_text(step: StepMetrics) -> str:
    return "" if step.solved is None else f"  solved {percent(step.solved)}"


def headline(point: EvaluationPoint | None) -> str:
    """The solve rate of an evaluation; its reward where it is not known whether tasks are solved."""
    if point is None:
        return percent(None)
    return number(point.reward) if point.solved is None else percent(point.solved)


def evaluation_text(point: EvaluationPoint | None) -> str:
    """What an evaluation measured, besides its headline."""
    if point is None:
        return "not evaluated yet"
    if point.solved is None:
        known = point.reward_low is not None and point.reward_high is not None
        interval = f" [{number(point.reward_low)}–{number(point.reward_high)}]" if known else ""
        return f"reward at step {point.step}{interval}, {point.tasks} tasks"
    interval = "" if point.low is None or point.high is None else f" [{point.low:.0%}–{point.high:.0%}]"
    return f"solved at step {point.step}{interval}, reward {number(point.reward)}, {point.tasks} tasks"


def transcript_lines(transcript: Transcript) -> list[str]:
    """The end of an episode, one line for each message."""
    reward = "unscorable" if transcript.reward is None else f"reward {transcript.reward:.3g}"
    lines = [f"sample of {transcript.group_id}: {reward}"]
    for role, text in transcript.messages[-SHOWN_MESSAGES:]:
        flat = " ".join(text.split()).translate(CONTROLS)
        cut = flat if len(flat) <= TRANSCRIPT_CHARS else f"{flat[:TRANSCRIPT_CHARS]}…"
        lines.append(f"  {role}: {cut}")
    return lines


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


def small_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


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
