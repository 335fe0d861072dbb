"""Settings of evaluation, during training and by `rollbook eval`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollbook.tasks.config import HubConfig, TasksConfig, is_hub

WARNING = "warning: "
"""Beginning of a line of the process of `rollbook eval` on stderr that its user reads."""


class EvaluationConfig(BaseModel, frozen=True, extra="forbid"):
    """Held-out tasks and how they are played. Read by `rollbook eval`, and during training when `every_steps` is set."""

    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate at the start, every this many steps, and at the end. Unset: not during training."""

    source: str | None = Field(default=None, min_length=1)
    """Source of the held-out tasks, written like `tasks.source`. Unset: `tasks.source`."""

    args: dict[str, Any] | None = None
    """Keyword arguments of a source function. Unset: `tasks.args`, where the source is the same."""

    split: str | None = Field(default=None, min_length=1)
    """Only rows of this split are played. Unset: all rows of the source. Where the source is that of the training tasks, rows of
    this split are not trained."""

    max_tasks: int = Field(default=512, ge=1)
    """At most this many tasks, spread evenly over the source."""

    episodes: int = Field(default=1, ge=1)
    """Episodes per task. More than one is useful only with sampling."""

    greedy: bool = True
    """Decode greedily; otherwise sample as in training."""

    label_field: str = Field(default="tier", min_length=1)
    """The field of a row by which results are grouped."""

    policy: Literal["own", "shared"] = "own"
    """During training. `own`: a separate policy server with the weights of a checkpoint, so that the version is pinned and training
    is not slowed down. `shared`: the run's own server, without a second copy of the model; versions may change during an
    evaluation, and the fraction of tasks played by a single version is reported."""

    workers: int = Field(default=1, ge=1)
    """Worker processes of the evaluation, in addition to those of training."""

    concurrency: int = Field(default=64, ge=1)
    """Tasks played concurrently by the evaluation."""

    final_wait_s: float = Field(default=120.0, ge=0)
    """How long the end of training waits for the last evaluation."""

    @property
    def is_configured(self) -> bool:
        """Whether held-out tasks were chosen, or are played during training."""
        return any(value is not None for value in (self.every_steps, self.source, self.args, self.split))

    def held_out_split(self, tasks: TasksConfig) -> str | None:
        """The split of the training source whose rows are not trained."""
        played = self.tasks_config(tasks)
        is_same = played.source == tasks.source and played.args == tasks.args
        return self.split if is_same and tasks.split is None and not is_hub(tasks.source) else None

    def tasks_config(self, tasks: TasksConfig) -> TasksConfig:
        """The config of the training tasks with the changes for evaluation."""
        is_same = self.source is None or self.source == tasks.source
        args = self.args if self.args is not None else (tasks.args if is_same else {})
        return TasksConfig(
            source=self.source or tasks.source,
            args=args,
            id_field=tasks.id_field,
            split=self.split,
            split_field=tasks.split_field if self.split is not None else "split",
            columns=tasks.columns if is_same else {},
            hub=tasks.hub if is_same else HubConfig(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """One evaluation by `rollbook eval`, as plain values: it is sent to another process as JSON."""

    config: str
    source_dir: str
    search_path: list[str]
    model_dir: str
    step: int
    overrides: list[str]
    modules: list[str] = field(default_factory=list)
    """Directories with the run's copies of the user's modules. They are searched first."""
