"""`rollouts.jsonl` has a few samples of each step, each step once."""

from pathlib import Path

import pytest

from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.sinks.sink import ROLLOUT_COLUMNS
from rollbook.trainer.data.planning import shown_samples
from rollbook.trainer.files.rollout_table import RolloutTable
from tests.parts.trainer.batches import batch_of, quick, sample


def test_samples_of_several_groups_are_written_with_text_reward_and_advantage(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    groups = [[sample(reward=1.0), sample(reward=0.0)], [sample(reward=0.5), sample(reward=None), sample(reward=0.0)]]
    table = RolloutTable(path, decode=lambda ids: "-".join(map(str, ids)))
    table.add(1, shown_samples(batch_of(1, groups), quick(), 3))
    rows = list(read_json_lines(path))
    assert [tuple(row) for row in rows] == [ROLLOUT_COLUMNS] * 3
    assert len({row["group"] for row in rows}) == 2
    assert rows[0]["text"] == "1-5-6"
    assert (rows[0]["reward"], rows[0]["advantage"]) == (1.0, pytest.approx(2**-0.5, abs=1e-3))
    assert [row["reward"] for row in rows[1:]] == [0.0, None]


def test_a_batch_that_is_trained_again_after_a_crash_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    for steps in ((1, 2), (1, 2, 3)):
        table = RolloutTable(path, decode=None)
        for step in steps:
            table.add(step, shown_samples(batch_of(step, [[sample(), sample(reward=0.0)]]), quick(), 1))
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3]


def test_zero_rollouts_per_step_write_no_file(tmp_path: Path) -> None:
    shown = shown_samples(batch_of(1, [[sample()]]), quick(), 0)
    RolloutTable(tmp_path / "rollouts.jsonl", decode=None).add(1, shown)
    assert not (tmp_path / "rollouts.jsonl").exists()
