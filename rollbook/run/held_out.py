"""The tasks of a run: those that are trained, those that are held out, and whether they overlap.

Rows of `evaluation.split` are not trained. Tasks of another source may still be equal to trained ones, apart from their id: they
are counted and reported, because a result on them is no result on held-out tasks.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.task import Task
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory, write_json
from rollbook.tasks.dataset import load_tasks, same_content

SHOWN = 3
"""Ids in a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out tasks of a run, before `evaluation.max_tasks` chooses some of them."""

    source: str
    split: str | None
    ids: tuple[str, ...]
    trained_ids: tuple[str, ...]
    """Held-out tasks whose content is also trained."""

    @property
    def warning(self) -> str | None:
        if not self.trained_ids:
            return None
        shown = ", ".join(self.trained_ids[:SHOWN]) + (", …" if len(self.trained_ids) > SHOWN else "")
        is_all = self.split is None and len(self.trained_ids) == len(self.ids)
        held_out = self.source if self.split is None else f"split {self.split!r} of {self.source}"
        remedy = (
            "Set evaluation.split to a part of the tasks, or evaluation.source to others"
            if is_all
            else f"Remove them from {held_out}, or from the training tasks"
        )
        return (
            f"{len(self.trained_ids)} of {len(self.ids)} held-out tasks are also trained ({shown}): results on them say "
            f"nothing about new tasks. {remedy}"
        )


def training_tasks(config: RunConfig, source_dir: Path) -> tuple[Task, ...]:
    """The tasks that are drawn: without those of the held-out split."""
    held_out = config.evaluation.held_out_split(config.tasks)
    return load_tasks(config.tasks, base_dir=source_dir, held_out=held_out)


def evaluation_tasks(config: RunConfig, source_dir: Path) -> tuple[Task, ...]:
    """All held-out tasks."""
    return load_tasks(config.evaluation.tasks_config(config.tasks), base_dir=source_dir, setting="evaluation.split")


def held_out(config: RunConfig, trained: tuple[Task, ...], source_dir: Path) -> HeldOut | None:
    """The held-out tasks, compared with the trained ones by content; None if the run has none."""
    if not config.evaluation.is_configured or config.tasks.is_posted:
        return None
    return evaluated(config, trained, source_dir)


def evaluated(config: RunConfig, trained: tuple[Task, ...], source_dir: Path) -> HeldOut:
    """The tasks that `rollbook eval` plays. Without settings of `[evaluation]` these are the trained ones."""
    played = config.evaluation.tasks_config(config.tasks)
    tasks = evaluation_tasks(config, source_dir)
    known = {same_content(config.tasks, task) for task in trained}
    return HeldOut(
        source=played.source,
        split=played.split,
        ids=tuple(task.id for task in tasks),
        trained_ids=tuple(task.id for task in tasks if same_content(config.tasks, task) in known),
    )


def record_held_out(directory: RunDirectory, found: HeldOut) -> None:
    """Add them to the run's record, unless the last entry is the same."""
    entries = recorded_held_out(directory)
    if not entries or entries[-1] != found:
        write_json(directory.held_out_file, [asdict(entry) for entry in (*entries, found)])


def recorded_held_out(directory: RunDirectory) -> list[HeldOut]:
    """The held-out tasks of a run: one entry, and another one where a resumed run had others."""
    try:
        return json_decoder(list[HeldOut]).decode(directory.held_out_file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return []
