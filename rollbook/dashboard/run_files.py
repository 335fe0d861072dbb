"""Reads `metrics.jsonl` and `mastery.jsonl` of a run directory.

`RunReader` serves live views: each poll reads only new lines, and memory stays bounded. `summarise`, `read_steps` and
`read_mastery` read a finished run once. Missing files and lines torn by a kill are skipped.

A step that was trained again after a crash has two rows; the last row counts.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rollbook.dashboard.json_tail import JsonTail
from rollbook.dashboard.run_metrics import RunMetrics, RunSummary, StepMetrics, tenth_means, trainer_utilisation

METRICS_FILE = "metrics.jsonl"
MASTERY_FILE = "mastery.jsonl"
KEPT_STEPS = 512
"""Enough for a sparkline and a pace. Plots read the whole file."""


class RunReader:
    """The live state of a run directory."""

    def __init__(self, run_dir: Path, *, kept_steps: int = KEPT_STEPS) -> None:
        self._rows = JsonTail(run_dir / METRICS_FILE)
        self._kept: deque[StepMetrics] = deque(maxlen=kept_steps)
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._max_lag = 0
        self._wait_s = 0.0
        self._train_s = 0.0

    def poll(self) -> RunMetrics:
        """Read new rows and return the current state."""
        for row in self._rows.poll():
            self._gauges.update(_measured(row))
            step = _step_metrics(row)
            if step is not None:
                self._add(step)
        return RunMetrics(
            steps=tuple(self._kept),
            last_step=self._last_step,
            max_lag=self._max_lag,
            wait_s=self._wait_s,
            train_s=self._train_s,
            gauges=dict(self._gauges),
        )

    def _add(self, step: StepMetrics) -> None:
        # After a crash the trainer returns to its checkpoint and reports the steps since then again.
        while self._kept and self._kept[-1].step >= step.step:
            self._count(self._kept.pop(), -1)
        self._kept.append(step)
        self._count(step, +1)
        self._last_step = step.step
        self._max_lag = max(self._max_lag, round(step.lag_max or 0))

    def _count(self, step: StepMetrics, sign: int) -> None:
        self._wait_s += sign * step.wait_s
        self._train_s += sign * step.train_s


def read_steps(run_dir: Path) -> list[StepMetrics]:
    """Every step of the run, in order."""
    found = (_step_metrics(row) for row in JsonTail(run_dir / METRICS_FILE).poll())
    by_step = {step.step: step for step in found if step is not None}
    return [by_step[step] for step in sorted(by_step)]


def summarise(run_dir: Path) -> RunSummary:
    steps = read_steps(run_dir)
    reward_first, reward_last = tenth_means([step.reward for step in steps])
    solved_first, solved_last = tenth_means([step.solved for step in steps])
    return RunSummary(
        steps=len(steps),
        reward_first=reward_first,
        reward_last=reward_last,
        solved_first=solved_first,
        solved_last=solved_last,
        max_lag=max((round(step.lag_max) for step in steps if step.lag_max is not None), default=0),
        trainer_utilisation=trainer_utilisation(sum(s.wait_s for s in steps), sum(s.train_s for s in steps)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MasteryPoint:
    """One curriculum tier after a number of draws."""

    draws: int
    is_open: bool
    graduated_share: float
    """Graduated tasks of all tasks of the tier."""
    rate: float | None
    """Mean success rate of the drawn tasks."""


def read_mastery(run_dir: Path) -> dict[str, list[MasteryPoint]]:
    """The points of each tier by draws, easiest tier first. Empty for a run without a curriculum."""
    tiers: dict[str, dict[int, MasteryPoint]] = {}
    for row in JsonTail(run_dir / MASTERY_FILE).poll():
        draws, listed = row.get("draws"), row.get("tiers")
        if isinstance(draws, int) and isinstance(listed, list):
            for tier in listed:
                if isinstance(tier, Mapping) and isinstance(tier.get("name"), str):
                    tiers.setdefault(tier["name"], {})[draws] = _mastery_point(draws, tier)
    return {name: [points[draws] for draws in sorted(points)] for name, points in tiers.items()}


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that have a value. Metric names contain a slash; labels do not."""
    return {key: float(value) for key, value in row.items() if "/" in key and is_number(value)}


def _step_metrics(row: Mapping[str, Any]) -> StepMetrics | None:
    """None for rows of other processes than the trainer."""
    step, time = row.get("step"), row.get("time")
    if row.get("process") != "trainer" or not isinstance(step, int) or step < 1 or not is_number(time):
        return None
    measured = _measured(row)
    return StepMetrics(
        step=step,
        time=float(time),
        reward=measured.get("rollout/reward"),
        solved=measured.get("rollout/accuracy"),
        lag_max=measured.get("async/version_offset_max"),
        lag_mean=measured.get("async/version_offset_mean"),
        wait_s=measured.get("perf/sample_wait_time", 0.0),
        train_s=measured.get("perf/train_time", 0.0),
        tokens=measured.get("train/tokens", 0.0),
    )


def _mastery_point(draws: int, tier: Mapping[str, Any]) -> MasteryPoint:
    tasks, graduated, rate = tier.get("tasks"), tier.get("graduated"), tier.get("rate")
    return MasteryPoint(
        draws=draws,
        is_open=bool(tier.get("open")),
        graduated_share=graduated / tasks if is_number(tasks) and is_number(graduated) and tasks > 0 else 0.0,
        rate=float(rate) if is_number(rate) else None,
    )
