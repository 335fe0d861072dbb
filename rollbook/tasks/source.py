"""From config to the `TaskSource` that a dispatcher is given."""

from collections.abc import Sequence
from pathlib import Path

from rollbook.contracts.ports import TaskSource
from rollbook.contracts.task import Task
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.cursor import CursorDataLoader
from rollbook.tasks.mastery_log import MasteryLog


def build_source(config: TasksConfig, tasks: Sequence[Task], *, mastery_file: Path | None = None) -> TaskSource:
    """`mastery_file`: where a curriculum writes down mastery over time, for people."""
    if config.order == "curriculum":
        log = None if mastery_file is None else MasteryLog(mastery_file)
        return Curriculum(tasks, config.curriculum, seed=config.seed, log=log)
    return CursorDataLoader(tasks, epochs=config.epochs, shuffle=config.shuffle, seed=config.seed)
