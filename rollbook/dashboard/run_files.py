"""Reads `metrics.jsonl`, `mastery.jsonl` and the transcripts of a run directory.

`RunReader` serves live views: each poll reads only new lines, and memory stays bounded. `summarise`, `read_steps` and
`read_mastery` read a finished run once. Missing files and lines torn by a kill are skipped.

A step that was trained again after a crash has two rows; the last row counts.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.dashboard.learning_problems import LearningMonitor, learning_problems
from rollbook.dashboard.run_metrics import (
    EvaluationPoint,
    RolloutTotals,
    RunMetrics,
    RunSummary,
    StepMetrics,
    Transcript,
    tenth_means,
    trainer_utilisation,
)
from rollbook.telemetry.json_tail import FolderTail, JsonTail, is_number

METRICS_FILE = "metrics.jsonl"
JOINED_METRICS = "metrics-*.jsonl"
"""Metrics of dispatchers that joined the run."""
MASTERY_FILE = "mastery.jsonl"
TIERS_FILE = "tiers.json"
WORKER_LOG = Path("logs") / "rollout-worker.jsonl"
TRANSCRIPT_EVENT = "rollout.transcript"
KEPT_STEPS = 512
"""Enough for a sparkline and a pace. Plots read the whole file."""


class RunReader:
    """The live state of a run directory."""

    def __init__(self, run_dir: Path, *, kept_steps: int = KEPT_STEPS) -> None:
        self._rows = JsonTail(run_dir / METRICS_FILE)
        self._joined_rows = FolderTail(run_dir, JOINED_METRICS)
        self._worker_events = JsonTail(run_dir / WORKER_LOG)
        self._history = _History()
        self._transcript: Transcript | None = None
        self._kept: deque[StepMetrics] = deque(maxlen=kept_steps)
        self._learning = LearningMonitor()
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._learned_step = 0
        self._max_lag = 0
        self._wait_s = 0.0
        self._train_s = 0.0

    def poll(self) -> RunMetrics:
        """Read new rows and return the current state."""
        for row in self._rows.poll():
            measured = _measured(row)
            self._gauges.update(measured)
            step = self._history.take(row, measured)
            if step is not None:
                self._add(step)
        for row in self._joined_rows.poll():
            self._history.add_played(_measured(row))
        for event in self._worker_events.poll():
            self._transcript = _transcript(event) or self._transcript
        self._learning.add_totals(self._history.totals)
        return RunMetrics(
            steps=tuple(self._kept),
            last_step=self._last_step,
            max_lag=self._max_lag,
            wait_s=self._wait_s,
            train_s=self._train_s,
            gauges=dict(self._gauges),
            totals=self._history.totals,
            evaluation=self._history.evaluations[-1] if self._history.evaluations else None,
            transcript=self._transcript,
            problems=tuple(map(str, self._learning.problems)),
        )

    def _add(self, step: StepMetrics) -> None:
        # After a crash the trainer returns to its checkpoint and reports the steps since then again.
        while self._kept and self._kept[-1].step >= step.step:
            self._count(self._kept.pop(), -1)
        self._kept.append(step)
        self._count(step, +1)
        if step.step > self._learned_step:
            self._learning.add(step)
            self._learned_step = step.step
        self._last_step = step.step
        self._max_lag = max(self._max_lag, round(step.lag_max or 0))

    def _count(self, step: StepMetrics, sign: int) -> None:
        self._wait_s += sign * step.wait_s
        self._train_s += sign * step.train_s


class _History:
    """Collects the rows of all processes in the order of the file."""

    def __init__(self) -> None:
        self.totals = RolloutTotals()
        self.evaluations: list[EvaluationPoint] = []
        self._since_step = RolloutTotals()

    def take(self, row: Mapping[str, Any], measured: Mapping[str, float]) -> StepMetrics | None:
        """Add a row with its measured values. Returns the step that a row of the trainer reports."""
        match row.get("process"):
            case "rollout":
                self.add_played(measured)
            case "evaluation" if (point := _evaluation_point(row, measured)) is not None:
                # A resumed run may evaluate a step again.
                self.evaluations = [*(one for one in self.evaluations if one.step < point.step), point]
            case "trainer" if (step := _step_metrics(row, measured, self._since_step)) is not None:
                self._since_step = RolloutTotals()
                return step
        return None

    def add_played(self, measured: Mapping[str, float]) -> None:
        self.totals, self._since_step = self.totals.plus(measured), self._since_step.plus(measured)


def read_steps(run_dir: Path) -> list[StepMetrics]:
    """Every step of the run, in order."""
    return _read(run_dir)[0]


def read_evaluations(run_dir: Path) -> list[EvaluationPoint]:
    return _read(run_dir)[1].evaluations


def _read(run_dir: Path) -> tuple[list[StepMetrics], _History]:
    history = _History()
    found = (history.take(row, _measured(row)) for row in JsonTail(run_dir / METRICS_FILE).poll())
    by_step = {step.step: step for step in found if step is not None}
    for row in FolderTail(run_dir, JOINED_METRICS).poll():
        history.add_played(_measured(row))
    return [by_step[step] for step in sorted(by_step)], history


def summarise(run_dir: Path) -> RunSummary:
    steps, history = _read(run_dir)
    return RunSummary(
        steps=len(steps),
        reward=tenth_means([step.reward for step in steps]),
        solved=tenth_means([step.solved for step in steps]),
        response_tokens=tenth_means([step.response_tokens for step in steps]),
        truncated=tenth_means([step.truncated for step in steps]),
        entropy=tenth_means([step.entropy for step in steps]),
        kl=tenth_means([step.kl for step in steps]),
        has_reference_kl=any(step.reference_kl is not None for step in steps),
        totals=history.totals,
        evaluations=tuple(history.evaluations),
        max_lag=max((round(step.lag_max) for step in steps if step.lag_max is not None), default=0),
        trainer_utilisation=trainer_utilisation(sum(s.wait_s for s in steps), sum(s.train_s for s in steps)),
        problems=tuple(map(str, learning_problems(steps, history.totals))),
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
    num_tasks: int = 0


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


def read_tiers(run_dir: Path) -> dict[str, str]:
    """The tier of each task. Empty for a run without tiers."""
    try:
        found = json.loads((run_dir / TIERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(task): str(tier) for task, tier in found.items()} if isinstance(found, dict) else {}


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that have a value. Metric names contain a slash; labels do not."""
    return {key: value for key, value in row.items() if "/" in key and is_number(value)}


def _step_metrics(row: Mapping[str, Any], measured: Mapping[str, float], played: RolloutTotals) -> StepMetrics | None:
    """A step from the trainer's row. `played`: since the previous step."""
    step, time = row.get("step"), row.get("time")
    if not isinstance(step, int) or step < 1 or not is_number(time):
        return None
    return StepMetrics(
        step=step,
        time=float(time),
        reward=measured.get("rollout/reward"),
        solved=measured.get("rollout/accuracy"),
        lag_max=measured.get("async/version_offset_max"),
        lag_mean=measured.get("async/version_offset_mean"),
        wait_s=measured.get("perf/sample_wait_time", 0.0),
        train_s=measured.get("perf/train_time", 0.0),
        step_s=measured.get("perf/step_time"),
        samples=measured.get("rollout/samples", 0.0),
        tokens=measured.get("train/tokens", 0.0),
        response_tokens=measured.get("rollout/response_len"),
        truncated=measured.get("rollout/truncated_ratio"),
        cut=measured.get("rollout/cut_ratio"),
        masked=measured.get("async/masked_share"),
        masked_first=measured.get("async/masked_share_first"),
        masked_first_turns=measured.get("async/masked_first_turns"),
        entropy=measured.get("train/entropy"),
        reference_kl=measured.get("train/reference_kl"),
        sampler_kl=measured.get("train/mean_kl"),
        ratio=measured.get("train/ratio_mean"),
        mismatch_weight=measured.get("train/mismatch_weight_mean"),
        ess=measured.get("train/ess"),
        pass_tokens=measured.get("perf/pass_tokens"),
        is_checkpointing=bool(measured.get("perf/checkpointing")),
        failed_pass_tokens=measured.get("perf/failed_pass_tokens"),
        inexact=measured.get("train/inexact_share"),
        unequal=unequal if isinstance(unequal := row.get("unequal"), str) else None,
        unscorable=played.unscorable_share,
        filtered=played.filtered_share,
        raw_solved=played.solved_share,
        raw_reward=played.mean_reward,
        highest_reward=played.highest_reward,
    )


def _evaluation_point(row: Mapping[str, Any], measured: Mapping[str, float]) -> EvaluationPoint | None:
    step = row.get("step")
    if not isinstance(step, int) or step < 0:
        return None
    return EvaluationPoint(
        step=step,
        tasks=round(measured.get("eval/tasks", 0.0)),
        reward=measured.get("eval/reward"),
        solved=measured.get("eval/solved"),
        low=measured.get("eval/solved_low"),
        high=measured.get("eval/solved_high"),
        reward_low=measured.get("eval/reward_low"),
        reward_high=measured.get("eval/reward_high"),
    )


def _transcript(event: Mapping[str, Any]) -> Transcript | None:
    messages, time, reward = event.get("messages"), event.get("time"), event.get("reward")
    if event.get("event") != TRANSCRIPT_EVENT or not isinstance(messages, list) or not is_number(time):
        return None
    return Transcript(
        time=float(time),
        group_id=str(event.get("group_id")),
        reward=float(reward) if is_number(reward) else None,
        messages=tuple(
            (str(message.get("role")), str(message.get("content")))
            for message in messages
            if isinstance(message, Mapping)
        ),
    )


def _mastery_point(draws: int, tier: Mapping[str, Any]) -> MasteryPoint:
    tasks, graduated, rate = tier.get("tasks"), tier.get("graduated"), tier.get("rate")
    return MasteryPoint(
        draws=draws,
        is_open=bool(tier.get("open")),
        graduated_share=graduated / tasks if is_number(tasks) and is_number(graduated) and tasks > 0 else 0.0,
        rate=float(rate) if is_number(rate) else None,
        num_tasks=int(tasks) if is_number(tasks) else 0,
    )
