"""Plots of a run: reward and solve rate, policy, lag, timeline, mastery. The only module that imports matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rollbook.dashboard.run_files import MasteryPoint, read_evaluations, read_mastery, read_steps
from rollbook.dashboard.run_metrics import EvaluationPoint, StepMetrics, moving_average, trainer_utilisation
from rollbook.dashboard.study import CellResult, StudyResults, mean_curve
from rollbook.telemetry.intervals import Intervals, read_intervals

INK, GRID = "#2b2b2b", "#dddddd"
REWARD, SOLVED, LIMIT = "#3b6ea8", "#2f8f5b", "#b3382c"
# The rows of the timeline, top to bottom: label, span, colour.
LANES = (
    ("generating", "policy.generate", "#2f8f5b"),
    ("training", "trainer.train", "#3b6ea8"),
    ("trainer waits", "trainer.wait_batch", "#d9a441"),
    ("weight sync", "trainer.publish", "#7d5ba6"),
)
GROUPS_SPAN = "rollout.group"
# Colours of tiers, easiest first, and of compared lines. Used cyclically.
TIERS = ("#2f8f5b", "#3b6ea8", "#d9a441", "#b3382c", "#7d5ba6")
# The timeline is about 1,400 pixels wide. Gaps thinner than a pixel are not drawn.
TIMELINE_PIXELS = 1400
# The second panel shows this many steps from the middle of the run, so that single steps are visible.
CLOSE_UP_STEPS = 12


def draw_plots(run_dir: Path, out: Path, *, max_head_offpolicy_versions: int, suffix: str = "png") -> list[Path]:
    """Draw all plots of a run into the folder `out`, as `png` or `svg`. A run without steps gives empty, labelled axes.

    Mastery is plotted for runs with a curriculum only.
    """
    out.mkdir(parents=True, exist_ok=True)
    steps = read_steps(run_dir)
    mastery = read_mastery(run_dir)
    return [
        _save(_reward_and_solved(steps, read_evaluations(run_dir)), out / f"reward_and_solved.{suffix}"),
        _save(_policy(steps), out / f"policy.{suffix}"),
        _save(_lag(steps, max_head_offpolicy_versions), out / f"lag.{suffix}"),
        _save(_timeline(run_dir, steps), out / f"timeline.{suffix}"),
        *([_save(_mastery(mastery), out / f"mastery.{suffix}")] if mastery else []),
    ]


def draw_comparison(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Path:
    """One panel for each measure, and in it one line for each named series. Series start at step 1."""
    figure, axes = _canvas(title, heights=[1.2] * len(panels))
    for one, (measure, lines) in zip(axes, panels.items(), strict=True):
        for at, (name, values) in enumerate(lines.items()):
            one.plot(range(1, len(values) + 1), _nan(values), color=TIERS[at % len(TIERS)], linewidth=1.6, label=name)
        one.set_title(measure, loc="left", fontsize=9, color=INK)
    axes[-1].set_xlabel("step")
    axes[0].legend(loc="best", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path)


def draw_study(out: Path, name: str, measure: str, results: StudyResults) -> list[Path]:
    """The mean curve of each cell with its interval, and the value of each cell at equal samples. Needs a finished run."""
    cells = [cell for cell in results.cells if cell.runs]
    if not cells:
        return []
    # One panel for each value of the first axis, so that the lines of a panel are distinguishable.
    panels: dict[str, list[CellResult]] = {}
    for cell in cells:
        labels = list(cell.runs[0].labels.values())
        panels.setdefault(labels[0] if len(labels) > 1 else "", []).append(cell)
    figure, axes = _canvas(f"{name}: {measure}", heights=[2.0] * len(panels), columns=2)
    for row, (label, members) in enumerate(panels.items()):
        for column, along in enumerate(("samples", "seconds")):
            one = axes[2 * row + column]
            for at, cell in enumerate(members):
                where, means = mean_curve(cell, along)
                colour = TIERS[at % len(TIERS)]
                rest = ", ".join(list(cell.runs[0].labels.values())[1:]) or cell.cell
                style = "-" if at < len(TIERS) else "--"
                one.plot(
                    where,
                    [m.mean for m in means],
                    style,
                    color=colour,
                    linewidth=1.8,
                    label=rest if label else cell.cell,
                )
                if means[0].low is not None:
                    one.fill_between(
                        where,
                        _nan([m.low for m in means]),
                        _nan([m.high for m in means]),
                        color=colour,
                        alpha=0.15,
                        linewidth=0,
                    )
            one.set_title(label, loc="left", fontsize=9, color=INK)
            one.set_xlabel({"samples": "trained samples", "seconds": "seconds of training"}[along])
        axes[2 * row].legend(loc="best", frameon=False, fontsize=8)
    figure_of_cells, (dots,) = _canvas(f"{name}: {measure} at equal samples", heights=[0.25 * len(cells)])
    for at, cell in enumerate(cells):
        value = cell.at_samples
        assert value is not None
        if value.low is not None and value.high is not None:
            dots.plot([value.low, value.high], [at, at], color=REWARD, linewidth=2)
        dots.plot([value.mean], [at], "o", color=REWARD)
    dots.set_yticks(range(len(cells)), [cell.cell for cell in cells])
    dots.set_ylim(len(cells) - 0.5, -0.5)
    return [_save(figure, out / "curves.svg"), _save(figure_of_cells, out / "cells.svg")]


def _reward_and_solved(steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationPoint]) -> Figure:
    is_judged = any(step.solved is not None for step in steps)
    figure, (axes,) = _canvas("Reward and solve rate" if is_judged else "Reward", heights=(1.0,))
    width = max(1, len(steps) // 25)
    for name, colour, values in (
        ("solve rate", SOLVED, [step.solved for step in steps]),
        ("reward", REWARD, [step.reward for step in steps]),
    ):
        if colour == SOLVED and not is_judged:
            continue
        numbers = [step.step for step in steps]
        axes.plot(numbers, _nan(values), color=colour, alpha=0.25, linewidth=1)
        label = name if width == 1 else f"{name}, mean of {width} steps"
        axes.plot(numbers, _nan(moving_average(values, width)), color=colour, linewidth=2, label=label)
    measured = [
        (p.step, value, low, high) for p in evaluations for value, low, high in [p.headline] if value is not None
    ]
    if measured:
        at = [step for step, *_ in measured]
        rates = [rate for _, rate, *_ in measured]
        name = "reward" if all(p.solved is None for p in evaluations) else "solve rate"
        below = [rate - (rate if low is None else low) for _, rate, low, _ in measured]
        above = [(rate if high is None else high) - rate for _, rate, _, high in measured]
        axes.errorbar(
            at,
            rates,
            [below, above],
            color=INK,
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=f"{name}, held-out tasks",
        )
    axes.set_xlabel("step")
    known = [v for step in steps for v in (step.reward, step.solved) if v is not None]
    axes.set_ylim(min(0.0, *known) if len(known) > 1 else 0.0, max(1.02, *known) if len(known) > 1 else 1.02)
    axes.legend(loc="best", frameon=False)
    return figure


def _policy(steps: Sequence[StepMetrics]) -> Figure:
    figure, (length, spread, shares) = _canvas(
        "Policy: length, entropy, divergence, lost samples", heights=(1.2, 1.2, 1.2)
    )
    numbers = [step.step for step in steps]
    length.plot(numbers, _nan([step.response_tokens for step in steps]), color=REWARD, linewidth=1.6)
    length.set_title("response, tokens", loc="left", fontsize=9, color=INK)
    spread.plot(numbers, _nan([step.entropy for step in steps]), color=SOLVED, linewidth=1.6, label="entropy, nats")
    divergence = spread.twinx()
    is_reference = any(step.reference_kl is not None for step in steps)
    divergence.plot(numbers, _nan([step.kl for step in steps]), color=LIMIT, linewidth=1.2)
    label = "KL to the initial policy, right axis" if is_reference else "KL to the sampler, right axis"
    spread.plot([], [], color=LIMIT, linewidth=1.2, label=label)
    spread.legend(loc="best", frameon=False, ncols=2)
    for name, colour, values in (
        ("truncated samples", REWARD, [step.truncated for step in steps]),
        ("unscorable episodes", LIMIT, [step.unscorable for step in steps]),
        ("filtered groups", SOLVED, [step.filtered for step in steps]),
    ):
        shares.plot(numbers, _nan(values), color=colour, linewidth=1.4, label=name)
    shares.set_ylim(-0.02, 1.04)
    shares.set_xlabel("step")
    shares.legend(loc="best", frameon=False, ncols=3)
    return figure


def _lag(steps: Sequence[StepMetrics], bound: int) -> Figure:
    figure, (axes,) = _canvas("Lag: policy versions between sampling and training", heights=(1.0,))
    numbers = [step.step for step in steps]
    maximum = [step.lag_max for step in steps]
    axes.step(numbers, _nan(maximum), where="mid", color=REWARD, linewidth=1.4, label="oldest token of the batch")
    axes.plot(numbers, _nan([step.lag_mean for step in steps]), color=SOLVED, linewidth=1.8, label="mean of the batch")
    axes.axhline(bound, color=LIMIT, linewidth=4, alpha=0.35, zorder=1, label=f"staleness bound ({bound})")
    axes.set_xlabel("step")
    axes.set_ylabel("versions")
    top = max([float(bound), *(lag for lag in maximum if lag is not None)])
    axes.set_ylim(-0.1, top * 1.25 + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", frameon=False, ncols=3)
    return figure


def _mastery(tiers: Mapping[str, Sequence[MasteryPoint]]) -> Figure:
    figure, (rates, graduated) = _canvas("Mastery by tier", heights=(1.4, 1.4))
    for at, (name, points) in enumerate(tiers.items()):
        colour = TIERS[at % len(TIERS)]
        draws = [point.draws for point in points]
        rates.plot(draws, _nan([point.rate for point in points]), color=colour, linewidth=1.8, label=name)
        shares = [point.graduated_share for point in points]
        graduated.step(draws, shares, where="post", color=colour, linewidth=1.8, label=name)
        opened = next((point.draws for point in points if point.is_open), None)
        if at > 0 and opened is not None:
            rates.axvline(opened, color=colour, linewidth=1, linestyle=":")
    rates.set_title("success rate of the drawn tasks (dotted line: the tier opens)", loc="left", fontsize=9, color=INK)
    graduated.set_title("graduated tasks", loc="left", fontsize=9, color=INK)
    graduated.set_xlabel("draws")
    for axes in (rates, graduated):
        axes.set_ylim(-0.02, 1.04)
    rates.legend(loc="best", frameon=False, ncols=len(TIERS))
    return figure


def draw_frontier(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    frontier: Sequence[tuple[float, float]],
    current: tuple[float, float],
) -> Path:
    """Predicted points by batch policy: mean lag, trained tokens per second, and a label. The best ones are labelled."""
    figure, (axes,) = _canvas("Predicted speed against lag", heights=(3.0,))
    for at, (policy, points) in enumerate(series.items()):
        xs, ys, labels = zip(*points, strict=True)
        axes.plot(xs, ys, "o", color=TIERS[at % len(TIERS)], markersize=5, label=policy)
        for x, y, label in zip(xs, ys, labels, strict=True):
            if (x, y) in frontier:
                axes.annotate(label, (x, y), xytext=(5, -10), textcoords="offset points", fontsize=7, color=INK)
    axes.plot([x for x, _ in frontier], [y for _, y in frontier], color=LIMIT, linewidth=1.2, label="frontier")
    axes.plot(*current, "D", color=INK, markersize=7, fillstyle="none", label="this configuration")
    axes.set_xlabel("mean lag of the trained groups, in versions")
    axes.set_ylabel("trained tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", frameon=False, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path)


def _timeline(run_dir: Path, steps: Sequence[StepMetrics]) -> Figure:
    spans = read_intervals(run_dir, [GROUPS_SPAN, *(name for _, name, _ in LANES)])
    recorded = [found for found in spans.values() if len(found)]
    begin = min((float(found.starts.min()) for found in recorded), default=0.0)
    end = max((float(found.ends.max()) for found in recorded), default=begin + 1.0)
    figure, (whole, close, groups) = _canvas("Timeline: generation against training", heights=(2.0, 2.0, 1.0))
    _draw_lanes(whole, spans, begin, end, origin=begin)
    utilisation = trainer_utilisation(sum(s.wait_s for s in steps), sum(s.train_s for s in steps))
    busy = "" if utilisation is None else f"; trainer busy {utilisation:.0%} of the time"
    whole.set_title(f"the whole run{busy}", loc="left", fontsize=9, color=INK)
    zoom_begin, zoom_end = _close_up(spans["trainer.train"], begin, end)
    _draw_lanes(close, spans, zoom_begin, zoom_end, origin=begin)
    close.set_title(f"{zoom_end - zoom_begin:.1f} s from its middle", loc="left", fontsize=9, color=INK)
    edges = np.linspace(begin, max(end, begin + 1e-3), 401)
    groups.stairs(spans[GROUPS_SPAN].mean_concurrency(edges), edges - begin, fill=True, color="#9aa7b5")
    groups.set_title("groups being played", loc="left", fontsize=9, color=INK)
    groups.set_xlabel("seconds")
    groups.set_xlim(0, max(end - begin, 1e-3))
    groups.set_ylim(bottom=0)
    return figure


def _close_up(training: Intervals, begin: float, end: float) -> tuple[float, float]:
    """The time window of `CLOSE_UP_STEPS` steps in the middle of the run."""
    if len(training) <= CLOSE_UP_STEPS:
        return begin, end
    starts = np.sort(training.starts)
    first = (len(starts) - CLOSE_UP_STEPS) // 2
    return float(starts[first]), float(starts[first + CLOSE_UP_STEPS])


def _draw_lanes(axes: Axes, spans: dict[str, Intervals], begin: float, end: float, *, origin: float) -> None:
    for row, (_, name, colour) in enumerate(LANES):
        drawn = spans[name].union(gap_s=(end - begin) / TIMELINE_PIXELS).within(begin, end)
        bars = np.stack((drawn.starts - origin, drawn.ends - drawn.starts), axis=1)
        axes.broken_barh([(float(x), float(w)) for x, w in bars], (row - 0.38, 0.76), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(LANES)), [label for label, _, _ in LANES])
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(begin - origin, max(end - origin, begin - origin + 1e-3))
    axes.grid(visible=False, axis="y")


def _canvas(title: str, *, heights: Sequence[float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot: no global state, usable from any thread. The axes are in reading order."""
    figure = Figure(figsize=(10.0, 2.2 + 1.4 * sum(heights)), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, color=INK, fontweight="bold")
    rows = figure.subplots(len(heights), columns, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    axes = list(rows.flat)
    for one in axes:
        one.grid(visible=True, color=GRID, linewidth=0.8)
        one.set_axisbelow(True)
        one.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def _nan(values: Sequence[float | None]) -> list[float]:
    """Missing values as NaN, which leave gaps in a line."""
    return [float("nan") if value is None else value for value in values]


def _save(figure: Figure, path: Path) -> Path:
    # Letters as text: an SVG with drawn letters is three times as large, and cannot be searched.
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
    return path
