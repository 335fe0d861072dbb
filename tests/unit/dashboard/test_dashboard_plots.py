"""Plots are drawn from a complete run, a run that just started and an empty run directory."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from rollbook.dashboard.plots import draw_plots
from rollbook.dashboard.run_files import read_mastery
from tests.parts.dashboard.run_dir import append_rows, trainer_row, write_run

NAMES = ["reward_and_solved.png", "policy.png", "lag.png", "timeline.png"]


def colours(path: Path) -> int:
    """Distinct colours of an image; empty axes have few."""
    levels = (imread(path)[::3, ::3, :3] * 15).round().astype(int)
    return len(np.unique(levels @ [256, 16, 1]))


def test_a_run_gives_plots_that_are_not_empty(tmp_path: Path) -> None:
    empty = draw_plots(tmp_path / "empty", tmp_path / "empty" / "plots", max_head_offpolicy_versions=2)
    drawn = draw_plots(write_run(tmp_path / "run", steps=40), tmp_path / "run" / "plots", max_head_offpolicy_versions=2)
    assert [path.name for path in drawn] == NAMES == [path.name for path in empty]
    for full, blank in zip(drawn, empty, strict=True):
        assert imread(full).shape[1] == 1300
        assert colours(full) > colours(blank)


def test_a_run_of_one_step_can_be_plotted(tmp_path: Path) -> None:
    for path in draw_plots(write_run(tmp_path, steps=1), tmp_path / "plots", max_head_offpolicy_versions=0):
        assert path.stat().st_size > 5_000


def test_steps_without_measurements_can_be_plotted(tmp_path: Path) -> None:
    nothing = {"rollout/reward": None, "rollout/accuracy": None, "async/version_offset_max": None}
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step, **nothing) for step in range(1, 4)), trainer_row(4))
    assert len(draw_plots(tmp_path, tmp_path / "plots", max_head_offpolicy_versions=1)) == len(NAMES)


def test_drawing_again_replaces_the_plots(tmp_path: Path) -> None:
    draw_plots(write_run(tmp_path, steps=3), tmp_path / "plots", max_head_offpolicy_versions=1)
    before = (tmp_path / "plots" / NAMES[0]).read_bytes()
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(4, 30)))
    draw_plots(tmp_path, tmp_path / "plots", max_head_offpolicy_versions=1)
    assert (tmp_path / "plots" / NAMES[0]).read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(NAMES)


def test_mastery_is_plotted_for_a_run_with_a_curriculum(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    append_rows(tmp_path / "mastery.jsonl", *(mastery_row(draws) for draws in range(1, 200, 5)))
    with (tmp_path / "mastery.jsonl").open("a") as file:
        file.write('{"draws": 300, "tiers": [{"na')
    drawn = draw_plots(tmp_path, tmp_path / "plots", max_head_offpolicy_versions=1)
    assert [path.name for path in drawn] == [*NAMES, "mastery.png"]
    assert colours(drawn[-1]) > 10


def test_mastery_is_read_by_tier_and_repeated_rows_count_once(tmp_path: Path) -> None:
    append_rows(tmp_path / "mastery.jsonl", mastery_row(60), mastery_row(10), mastery_row(60), {"draws": "odd"})
    tiers = read_mastery(tmp_path)
    assert list(tiers) == ["easy", "hard"]
    assert [(point.draws, point.is_open) for point in tiers["hard"]] == [(10, False), (60, True)]
    assert tiers["easy"][1].graduated_share == 0.6
    assert tiers["hard"][0].rate is None


def mastery_row(draws: int) -> dict[str, object]:
    """Two tiers; the second opens after 50 draws."""
    done = min(1.0, draws / 100)
    is_open = draws > 50
    return {
        "time": float(draws),
        "draws": draws,
        "tiers": [
            {"name": "easy", "open": True, "tasks": 10, "drawn": 10, "graduated": round(10 * done), "rate": done},
            {"name": "hard", "open": is_open, "tasks": 4, "drawn": 2, "graduated": 0, "rate": 0.2 if is_open else None},
        ],
    }
