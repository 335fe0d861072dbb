"""Settings of tasks and of the curriculum."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.contracts.task import Task, TaskId
from rollbook.tasks.config import CurriculumConfig, TasksConfig
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.cursor import CursorDataLoader
from rollbook.tasks.dataset import DatasetError, build_source, load_tasks
from tests.parts.tasks.curriculum import tiered


def config(**given: Any) -> TasksConfig:
    return TasksConfig.model_validate({"source": "t.jsonl", **given})


def test_the_order_chooses_the_source(tmp_path: Path) -> None:
    assert isinstance(build_source(config(), tiered(2)), CursorDataLoader)
    built = build_source(config(order="curriculum", seed=3), tiered(9), mastery_file=tmp_path / "mastery.jsonl")
    assert isinstance(built, Curriculum)
    assert built.propose(9) == Curriculum(tiered(9), seed=3).propose(9) != Curriculum(tiered(9), seed=4).propose(9)
    (draw,) = built.propose(1)
    assert not (tmp_path / "mastery.jsonl").exists(), "nothing is logged before the first result"
    assert draw.position == 0


def test_a_source_is_endless_by_the_settings_of_its_order() -> None:
    assert config().is_endless
    assert not config(epochs=1).is_endless
    assert config(order="curriculum").is_endless
    assert not config(order="curriculum", curriculum={"draws": 9}).is_endless


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"curriculum": {"decay": 0.5}}, 'read only with order = "curriculum"'),
        ({"order": "curriculum", "epochs": 2}, "epochs is read by the cursor only"),
        ({"order": "curriculum", "shuffle": False}, "shuffle is read by the cursor only"),
        ({"order": "random"}, "'cursor' or 'curriculum'"),
    ],
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relapse_rate": 0.8}, "relapse_rate = 0.8 is above graduate_rate = 0.7"),
        ({"demote_rate": 0.8}, "demote_rate = 0.8 is above promote_rate"),
        ({"fast_track_rate": 0.6}, "the fast track would need a lower rate"),
        ({"fast_track_tries": 11}, "the fast track would need more draws"),
        ({"task_window": 2}, "no task could ever graduate"),
        ({"tier_window": 12}, "no tier could ever be closed again"),
        ({"promote_tries": 21}, "no other tier could ever open"),
        ({"repeat_after": 20.0}, "the first interval would be longer than the longest"),
        ({"tiers": ["a", "a"]}, "contains a tier twice"),
        ({"sampler": "sequential", "novelty": 2.0}, "'sequential' does not read novelty"),
        ({"weight_field": "share"}, "'mastery' does not read weight_field"),
        ({"sampler": "weighted", "recency": 0.5, "repeat_after": 1.0}, "does not read recency, repeat_after"),
        ({"sampler": "luck"}, "sampler"),
        ({"speed": 1}, "speed"),
    ],
)
def test_inconsistent_curriculum_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig.model_validate(given)


def test_a_resolved_config_loads_again() -> None:
    for given in ({}, {"order": "curriculum", "curriculum": {"tiers": ["a", 1], "sampler": "weighted"}}):
        resolved = config(**given)
        assert TasksConfig.model_validate(resolved.model_dump(exclude_none=True)) == resolved


def test_ids_do_not_depend_on_the_split(tmp_path: Path) -> None:
    rows = ['{"id": "x", "split": "test"}', '{"id": "x", "split": "train"}', '{"id": "y", "split": "train"}']
    (tmp_path / "t.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert [task.id for task in load_tasks(config(split="train"), base_dir=tmp_path)] == ["x#2", "y"]
    assert [task.id for task in load_tasks(config(split="test"), base_dir=tmp_path)] == ["x"]
    assert len(load_tasks(config(), base_dir=tmp_path)) == 3
    with pytest.raises(DatasetError, match="no task is in split 'dev'; the splits are: test, train"):
        load_tasks(config(split="dev"), base_dir=tmp_path)
    with pytest.raises(DatasetError, match="task 'x' has no text in field 'part'"):
        load_tasks(config(split="train", split_field="part"), base_dir=tmp_path)


def test_a_cursor_ignores_history() -> None:
    cursor = CursorDataLoader([Task(id=TaskId("t"))])
    before = cursor.propose(3)
    assert not cursor.needs_history
    cursor.recall([])
    assert cursor.propose(3) == before
