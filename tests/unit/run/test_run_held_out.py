"""Held-out tasks are not trained; those that are trained anyway are counted, reported and recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.held_out import held_out, record_held_out, recorded_held_out, training_tasks
from rollbook.tasks.dataset import DatasetError

ROWS = [
    {"id": "a", "question": "1 + 1", "split": "train"},
    {"id": "b", "question": "1 + 2", "split": "train"},
    {"id": "c", "question": "1 + 3", "split": "test"},
    {"id": "d", "question": "1 + 1", "split": "test"},
]


def config(
    tmp_path: Path, *, tasks: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None
) -> RunConfig:
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return RunConfig.model_validate(
        {
            "run": {"name": "run"},
            "model": {"path": "model"},
            "tasks": {"source": "tasks.jsonl", **(tasks or {})},
            "evaluation": evaluation or {},
        }
    )


def ids(config: RunConfig, tmp_path: Path) -> list[str]:
    return [task.id for task in training_tasks(config, tmp_path)]


def test_rows_of_the_evaluated_split_are_not_trained(tmp_path: Path) -> None:
    assert ids(config(tmp_path), tmp_path) == ["a", "b", "c", "d"]
    assert ids(config(tmp_path, evaluation={"split": "test"}), tmp_path) == ["a", "b"]
    assert ids(config(tmp_path, evaluation={"split": "test", "source": "tasks.jsonl"}), tmp_path) == ["a", "b"]
    # Whoever names the training split decides.
    assert ids(config(tmp_path, tasks={"split": "test"}, evaluation={"split": "test"}), tmp_path) == ["c", "d"]
    (tmp_path / "other.jsonl").write_text(json.dumps(ROWS[2]), encoding="utf-8")
    other = config(tmp_path, evaluation={"split": "test", "source": "other.jsonl"})
    assert ids(other, tmp_path) == ["a", "b", "c", "d"]


def test_another_field_may_name_the_split(tmp_path: Path) -> None:
    renamed = config(tmp_path, tasks={"split_field": "id"}, evaluation={"split": "c"})
    assert ids(renamed, tmp_path) == ["a", "b", "d"]


def test_a_run_needs_tasks_that_are_not_held_out(tmp_path: Path) -> None:
    one = config(tmp_path, tasks={"limit": 2}, evaluation={"split": "train"})
    with pytest.raises(DatasetError, match=r"all 2 tasks are in split 'train', which is held out \(evaluation.split\)"):
        training_tasks(one, tmp_path)


@pytest.mark.parametrize(
    ("tasks", "evaluation", "also_trained", "of"),
    [
        ({}, {"split": "test"}, ["d"], 2),
        ({"split": "train"}, {"split": "test"}, ["d"], 2),
        ({}, {"every_steps": 5}, ["a", "b", "c", "d"], 4),
        ({}, {"source": "other.jsonl"}, ["x"], 2),
    ],
)
def test_held_out_tasks_with_the_content_of_trained_ones_are_counted(
    tmp_path: Path, tasks: dict[str, Any], evaluation: dict[str, Any], also_trained: list[str], of: int
) -> None:
    other = [{"id": "x", "question": "1 + 2"}, {"id": "y", "question": "9 + 9"}]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, other)), encoding="utf-8")
    run = config(tmp_path, tasks=tasks, evaluation=evaluation)
    found = held_out(run, training_tasks(run, tmp_path), tmp_path)
    assert found is not None
    assert list(found.trained_ids) == also_trained
    assert found.warning is not None
    assert found.warning.startswith(f"{len(also_trained)} of {of} held-out tasks are also trained")


def test_without_an_evaluation_nothing_is_held_out(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert held_out(run, training_tasks(run, tmp_path), tmp_path) is None


def test_a_run_records_which_tasks_were_held_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    first, second = ({"split": "test"}, {"split": "train"})
    for evaluation in (first, first, second):
        run = config(tmp_path, evaluation=evaluation)
        found = held_out(run, training_tasks(run, tmp_path), tmp_path)
        assert found is not None
        record_held_out(directory, found)
    entries = recorded_held_out(directory)
    assert [(entry.split, entry.ids, entry.trained_ids) for entry in entries] == [
        ("test", ("c", "d"), ("d",)),
        ("train", ("a", "b"), ("a",)),
    ]
