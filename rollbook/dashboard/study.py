"""The results of a study: learning curves of its runs, and means over seeds with bootstrap intervals. No drawing.

Cells are compared at equal numbers of trained samples and at equal seconds of training: at the smallest value that all runs
reached. Between two evaluations a curve is interpolated linearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollbook.dashboard.learning_problems import learning_problems
from rollbook.dashboard.run_files import read_evaluations, read_steps
from rollbook.dashboard.run_metrics import StepMetrics, moving_average

RESAMPLES = 10_000
CURVE_POINTS = 30
REWARD_WINDOW = 10
"""The reward of single batches is noisy: their curve is the mean of this many steps."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    step: int
    samples: float
    """Samples trained so far."""
    seconds: float
    """Seconds of training so far, without start-up and without the time in which a resumed run was stopped."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One run of a study."""

    cell: str
    labels: Mapping[str, str]
    seed: int
    end: str
    """How it ended: finished, drained, interrupted, failed; `started` or `missing` if it has no result yet."""
    curve: tuple[CurvePoint, ...] = ()
    steps: int = 0
    seconds_per_step: float | None = None
    max_lag: int = 0
    ess: float | None = None
    """The lowest mean over a tenth of the run."""
    entropy: float | None = None
    """Mean over the last tenth of the run."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. With one seed there is no interval."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    cell: str
    runs: tuple[StudyRun, ...]
    """Runs with a curve."""
    at_samples: Estimate | None = None
    at_seconds: Estimate | None = None
    best: Estimate | None = None
    """The best evaluation of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResults:
    measure: str
    runs: tuple[StudyRun, ...]
    cells: tuple[CellResult, ...]
    samples: float | None
    """All finished runs trained at least this many samples."""
    seconds: float | None
    """All finished runs trained at least this long."""


def read_run(run_dir: Path, run: StudyRun, *, measure: str) -> StudyRun:
    """The run with its curve and its numbers, read from its directory."""
    steps = read_steps(run_dir)
    samples, seconds = np.cumsum([step.samples for step in steps]), np.cumsum(step_seconds(steps))
    position = {step.step: at for at, step in enumerate(steps)}
    values: list[tuple[int, float | None]]
    if measure == "reward":
        rewards = moving_average([step.reward for step in steps], REWARD_WINDOW)
        values = [(step.step, reward) for step, reward in zip(steps, rewards, strict=True)]
    else:
        is_solved = measure == "held_out_solved"
        values = [(point.step, point.solved if is_solved else point.reward) for point in read_evaluations(run_dir)]
    curve = tuple(
        CurvePoint(step, float(samples[at]) if at >= 0 else 0.0, float(seconds[at]) if at >= 0 else 0.0, value)
        for step, value in values
        if value is not None and (at := -1 if step == 0 else position.get(step, -2)) > -2
    )
    tenth = max(1, len(steps) // 10)
    ess = [mean for mean in moving_average([step.ess for step in steps], tenth)[tenth - 1 :] if mean is not None]
    entropy = [step.entropy for step in steps[-tenth:] if step.entropy is not None]
    return replace(
        run,
        curve=curve,
        steps=len(steps),
        seconds_per_step=float(seconds[-1]) / len(steps) if steps else None,
        max_lag=max((round(step.lag_max) for step in steps if step.lag_max is not None), default=0),
        ess=min(ess, default=None),
        entropy=sum(entropy) / len(entropy) if entropy else None,
        problems=tuple(problem.kind.value for problem in learning_problems(steps)),
    )


def step_seconds(steps: Sequence[StepMetrics]) -> list[float]:
    """The seconds of each step: from row to row, but at most the step's own time, so that a stopped run does not count."""
    times = [step.time for step in steps]
    own = [step.wait_s + step.train_s if step.step_s is None else step.step_s for step in steps]
    return own[:1] + [min(own[at], max(0.0, times[at] - times[at - 1])) for at in range(1, len(steps))]


def compare(runs: Sequence[StudyRun], *, measure: str) -> StudyResults:
    """Means over the seeds of each cell. Runs that did not finish are listed, but not averaged."""
    finished = [run for run in runs if run.end == "finished" and run.curve]
    samples = min((run.curve[-1].samples for run in finished), default=None)
    seconds = min((run.curve[-1].seconds for run in finished), default=None)
    cells = []
    for name in dict.fromkeys(run.cell for run in runs):
        own = tuple(run for run in finished if run.cell == name)
        cells.append(
            CellResult(
                cell=name,
                runs=own,
                at_samples=None
                if samples is None or not own
                else estimate([value_at(r, samples, "samples") for r in own]),
                at_seconds=None
                if seconds is None or not own
                else estimate([value_at(r, seconds, "seconds") for r in own]),
                best=estimate([max(point.value for point in run.curve) for run in own]) if own else None,
            )
        )
    return StudyResults(measure=measure, runs=tuple(runs), cells=tuple(cells), samples=samples, seconds=seconds)


def estimate(values: Sequence[float], *, resamples: int = RESAMPLES) -> Estimate:
    """The mean and its 95 % percentile bootstrap interval. The random numbers are fixed, so that a report is reproducible."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean)
    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values, dtype=np.float64), (resamples, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(mean, float(low), float(high))


def value_at(run: StudyRun, position: float, axis: str) -> float:
    """The curve's value after `position` samples or seconds."""
    along = [getattr(point, axis) for point in run.curve]
    return float(np.interp(position, along, [point.value for point in run.curve]))


def mean_curve(cell: CellResult, axis: str) -> tuple[NDArray[np.float64], list[Estimate]]:
    """The mean over seeds along `samples` or `seconds`, as far as every run of the cell goes."""
    start = max(getattr(run.curve[0], axis) for run in cell.runs)
    end = min(getattr(run.curve[-1], axis) for run in cell.runs)
    along = np.linspace(start, max(start, end), CURVE_POINTS)
    return along, [
        estimate([value_at(run, float(at), axis) for run in cell.runs], resamples=RESAMPLES // 10) for at in along
    ]
