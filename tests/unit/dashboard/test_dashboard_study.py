"""Curves, means and intervals of a study."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.commands.training.study_replays import write_replay_report
from rollbook.commands.training.study_report import write_report
from rollbook.dashboard.plots import draw_study
from rollbook.dashboard.run_metrics import StepMetrics
from rollbook.dashboard.study import (
    CurvePoint,
    StudyRun,
    compare,
    estimate,
    mean_curve,
    read_run,
    step_seconds,
    value_at,
)
from rollbook.run.config.study import Cell, Study


def run(cell: str, seed: int, values: list[float], *, end: str = "finished", seconds: float = 1.0) -> StudyRun:
    """A run with an evaluation every step of 10 samples."""
    curve = tuple(CurvePoint(at, 10.0 * at, seconds * at, value) for at, value in enumerate(values))
    return StudyRun(cell=cell, labels={"loss": cell}, seed=seed, end=end, curve=curve, steps=len(values) - 1)


def test_cells_are_compared_at_the_samples_and_the_seconds_that_all_runs_reached() -> None:
    slow = run("slow", 0, [0.0, 0.2, 0.4, 0.6], seconds=2.0)
    quick = run("quick", 0, [0.0, 0.1, 0.2, 0.3, 0.4], seconds=1.0)
    found = compare([slow, quick], measure="held_out_solved")
    assert (found.samples, found.seconds) == (30.0, 4.0)
    values = {
        cell.cell: (cell.at_samples.mean, cell.at_seconds.mean)
        for cell in found.cells
        if cell.at_samples is not None and cell.at_seconds is not None
    }
    assert values == {"slow": pytest.approx((0.6, 0.4)), "quick": pytest.approx((0.3, 0.4))}


def test_runs_that_did_not_finish_are_listed_but_not_averaged() -> None:
    found = compare(
        [run("a", 0, [0.0, 0.5]), run("a", 1, [0.0], end="drained"), run("b", 0, [], end="missing")],
        measure="held_out_solved",
    )
    assert [len(cell.runs) for cell in found.cells] == [1, 0]
    assert found.cells[1].at_samples is None
    assert len(found.runs) == 3


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_an_interval_contains_the_mean_and_stays_inside_the_values(values: list[float]) -> None:
    found = estimate(values, resamples=200)
    assert found.low is not None
    assert found.high is not None
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found == estimate(values, resamples=200)


def test_more_seeds_make_the_interval_narrower() -> None:
    few, many = estimate([0.4, 0.6]), estimate([0.4, 0.6] * 20)
    assert few.low is not None
    assert few.high is not None
    assert many.low is not None
    assert many.high is not None
    assert many.high - many.low < 0.5 * (few.high - few.low)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(-10, 100))
def test_a_curve_is_never_extrapolated(values: list[float], at: float) -> None:
    assert min(values) <= value_at(run("a", 0, values), at, "samples") <= max(values)


def test_the_time_in_which_a_run_was_stopped_does_not_count() -> None:
    steps = [StepMetrics(step=n, time=t, step_s=2.0) for n, t in ((1, 100.0), (2, 101.5), (3, 5000.0))]
    assert step_seconds(steps) == [2.0, 1.5, 2.0]


def test_a_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    rows = [{"process": "evaluation", "step": 0, "eval/solved": 0.1, "eval/reward": 0.2}]
    for step in range(1, 21):
        rows.append(
            {
                "process": "trainer",
                "time": 100.0 + step,
                "step": step,
                "rollout/samples": 8,
                "rollout/reward": step / 20,
                "perf/step_time": 1.0,
                "async/version_offset_max": 2,
                # The policy moved too fast for two steps.
                "train/ess": 0.3 if step in (11, 12) else 0.9,
                "train/entropy": 2.0 - step / 20,
            }
        )
        if step % 10 == 0:
            rows.append({"process": "evaluation", "step": step, "eval/solved": step / 40, "eval/reward": 0.5})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    empty = StudyRun(cell="a", labels={}, seed=0, end="finished")
    found = read_run(tmp_path, empty, measure="held_out_solved")
    assert found.curve == (
        CurvePoint(0, 0.0, 0.0, 0.1),
        CurvePoint(10, 80.0, 10.0, 0.25),
        CurvePoint(20, 160.0, 20.0, 0.5),
    )
    assert (found.steps, found.seconds_per_step, found.max_lag) == (20, 1.0, 2)
    assert found.ess == pytest.approx(0.3)
    assert found.entropy == pytest.approx(1.025)
    rewards = read_run(tmp_path, empty, measure="reward")
    assert rewards.curve[-1].value == pytest.approx(sum(range(11, 21)) / 200)


def test_the_pictures_are_drawn_and_a_study_without_results_has_none(tmp_path: Path) -> None:
    runs = [run(cell, seed, [0.0, 0.2 * seed, 0.5]) for cell in ("a", "b") for seed in (0, 1)]
    found = compare(runs, measure="held_out_solved")
    along, means = mean_curve(found.cells[0], "samples")
    assert (along[0], along[-1]) == (0.0, 20.0)
    assert means[-1].mean == pytest.approx(0.5)
    drawn = draw_study(tmp_path, "study", "solved", found)
    assert [path.name for path in drawn] == ["curves.svg", "cells.svg"]
    assert all(path.read_text(encoding="utf-8").count("<path") > 10 for path in drawn)
    assert draw_study(tmp_path, "study", "solved", compare([], measure="held_out_solved")) == []


def test_where_no_evaluation_knows_what_is_solved_the_held_out_reward_is_compared(tmp_path: Path) -> None:
    cell = Cell(name="a", seed=0, labels={}, overrides=())
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    rows: list[dict[str, object]] = [{"process": "evaluation", "step": 0, "eval/reward": 0.25}]
    rows += [{"process": "trainer", "time": 101.0, "step": 1, "rollout/samples": 8, "perf/step_time": 1.0}]
    rows += [{"process": "evaluation", "step": 1, "eval/reward": 0.75}]
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    plan = Study(name="s", file=tmp_path, config=tmp_path, sft=None, measure="held_out_solved", axes=(), cells=(cell,))
    report = write_report(plan, tmp_path, {cell: (run_dir, {"end": "finished"})})
    assert report.results.measure == "held_out_reward"
    assert [point.value for point in report.results.runs[0].curve] == [0.25, 0.75]
    assert "reward of held-out tasks" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


def replayed(gains: list[float], ess: list[float]) -> dict[str, Any]:
    same: list[float | None] = [0.5] * len(gains)
    names = ("train/entropy", "train/mean_kl", "train/grad_norm", "train/ppo_clip_frac")
    return {"end": "finished", "lines": {"gain": gains, "train/ess": ess, **dict.fromkeys(names, same)}}


def test_replays_are_compared_at_the_last_step_that_all_of_them_can_be_trusted_at(tmp_path: Path) -> None:
    cells = [
        Cell(name=name, seed=number, labels={}, overrides=(), replayed=tmp_path / f"run{number}")
        for name in ("as recorded", "loss=b", "loss=c")
        for number in range(2)
    ]
    plan = Study(name="s", file=tmp_path, config=None, sft=None, measure="reward", axes=(), cells=tuple(cells))
    slow, fast = [at / 100 for at in range(20)], [at / 10 for at in range(20)]
    steady = [1.0] * 20
    results = dict(zip(cells, [*[replayed(slow, steady)] * 2, replayed(fast, steady), None, None, None], strict=True))
    # From step 11 on, the recorded samples say little about the policy of the second cell on the second run.
    results[cells[3]] = replayed(fast, [0.9] * 10 + [0.4] * 10)
    results[cells[4]] = {"end": "failed", "message": "out of memory"}
    report = write_replay_report(plan, tmp_path, results)
    assert report.steps == 10
    assert [line[:4] for line in report.table()] == [
        ("loss=b", "2", "0.9 [0.9 – 0.9]", "10"),
        ("as recorded", "2", "0.09 [0.09 – 0.09]", "20"),
    ]
    assert report.exit_code == 1
    page = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "Compared at step 10," in page
    assert f"- loss=c on {tmp_path / 'run0'}: failed out of memory" in page
    assert f"- loss=c on {tmp_path / 'run1'}: missing" in page
    nothing = write_replay_report(plan, tmp_path, dict.fromkeys(cells))
    assert (nothing.steps, nothing.cells, nothing.exit_code) == (None, (), 0)
