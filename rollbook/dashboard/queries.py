"""What a view asks of a run directory: `metrics.jsonl` and `spans/<process>.jsonl`, read but never written.

`RunReader` is for live use: each poll costs what is new, and its memory is bounded whatever the length of the run. `summary` and
`read_steps` read a finished run once. All of them survive missing files and lines torn by a kill.

A step that was trained again after a crash is told twice; the last telling counts.
"""

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from rollbook.dashboard.figures import RunFigures, RunSummary, StepFigures, overlap_ratio, tenth_means
from rollbook.dashboard.tail import FolderTail, JsonTail

__all__ = ["SPANS_FOLDER", "RunReader", "RunSummary", "is_number", "numbers", "read_steps", "step_figures", "summary"]

METRICS_FILE = "metrics.jsonl"
SPANS_FOLDER = "spans"
TRAINER = "trainer"
# Enough for a sparkline and for a pace; the plots read the whole file.
KEPT_STEPS = 512


class RunReader:
    """The live state of a run directory."""

    def __init__(self, run_dir: Path, *, kept_steps: int = KEPT_STEPS) -> None:
        self._metrics = JsonTail(run_dir / METRICS_FILE)
        self._kept: deque[StepFigures] = deque(maxlen=kept_steps)
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._max_lag = 0
        self._wait_s = 0.0
        self._train_s = 0.0
        self._tokens = 0.0

    def poll(self) -> RunFigures:
        """Read what is new and tell where the run stands."""
        for row in self._metrics.poll():
            self._gauges.update(numbers(row))
            step = step_figures(row)
            if step is not None:
                self._take(step)
        return RunFigures(
            steps=tuple(self._kept),
            last_step=self._last_step,
            max_lag=self._max_lag,
            wait_s=self._wait_s,
            train_s=self._train_s,
            tokens=self._tokens,
            gauges=dict(self._gauges),
        )

    def _take(self, step: StepFigures) -> None:
        # After a crash the trainer goes back to its checkpoint: what it told since then is told again.
        while self._kept and self._kept[-1].step >= step.step:
            self._count(self._kept.pop(), -1)
        self._kept.append(step)
        self._count(step, +1)
        self._last_step = step.step
        self._max_lag = max(self._max_lag, round(step.lag_max or 0))

    def _count(self, step: StepFigures, sign: int) -> None:
        self._wait_s += sign * step.wait_s
        self._train_s += sign * step.train_s
        self._tokens += sign * step.tokens


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that were measured. Metric names have a slash; labels do not."""
    return {key: float(value) for key, value in row.items() if "/" in key and is_number(value)}


def step_figures(row: Mapping[str, Any]) -> StepFigures | None:
    """A row of the trainer as figures; None for anybody else's row."""
    step, told = row.get("step"), row.get("time")
    if row.get("process") != TRAINER or not isinstance(step, int) or step < 1 or not is_number(told):
        return None
    measured = numbers(row)
    return StepFigures(
        step=step,
        time=float(told),
        reward=measured.get("rollout/reward"),
        solved=measured.get("rollout/accuracy"),
        lag_max=measured.get("async/version_offset_max"),
        lag_mean=measured.get("async/version_offset_mean"),
        wait_s=measured.get("perf/sample_wait_time", 0.0),
        train_s=measured.get("perf/train_time", 0.0),
        tokens=measured.get("train/tokens", 0.0),
    )


def read_steps(run_dir: Path) -> list[StepFigures]:
    """Every step of the run, in order; for a step that was told twice, the last telling."""
    by_step: dict[int, StepFigures] = {}
    for row in JsonTail(run_dir / METRICS_FILE).poll():
        step = step_figures(row)
        if step is not None:
            by_step[step.step] = step
    return [by_step[step] for step in sorted(by_step)]


def summary(run_dir: Path) -> RunSummary:
    """The whole run in one line."""
    steps = read_steps(run_dir)
    reward_first, reward_last = tenth_means([step.reward for step in steps])
    solved_first, solved_last = tenth_means([step.solved for step in steps])
    return RunSummary(
        steps=len(steps),
        seconds=_recorded_seconds(run_dir),
        reward_first=reward_first,
        reward_last=reward_last,
        solved_first=solved_first,
        solved_last=solved_last,
        max_lag=max((round(step.lag_max) for step in steps if step.lag_max is not None), default=0),
        overlap_ratio=overlap_ratio(sum(s.wait_s for s in steps), sum(s.train_s for s in steps)),
        tokens=round(sum(step.tokens for step in steps)),
    )


def _recorded_seconds(run_dir: Path) -> float:
    first, last = math.inf, -math.inf
    for row in JsonTail(run_dir / METRICS_FILE).poll():
        if is_number(row.get("time")):
            first, last = min(first, row["time"]), max(last, row["time"])
    for row in FolderTail(run_dir / SPANS_FOLDER).poll():
        if is_number(row.get("start")) and is_number(row.get("end")):
            first, last = min(first, row["start"]), max(last, row["end"])
    return max(0.0, last - first) if first <= last else 0.0


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
