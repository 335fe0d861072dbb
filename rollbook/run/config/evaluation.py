"""What an operator may set about measuring a policy, during training and by `rollbook eval`."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from rollbook.tasks.config import TasksConfig


class EvaluationConfig(BaseModel, frozen=True, extra="forbid"):
    """Held-out tasks and how they are played. Read by `rollbook eval`, and during training when `every_steps` is set."""

    every_steps: int | None = Field(default=None, ge=1)
    """Measure at the start, each time this many more steps are trained, and at the end. Unset: not during training."""

    source: str | None = Field(default=None, min_length=1)
    """Where held-out tasks come from, written like `tasks.source`. Unset: from there."""

    args: dict[str, Any] | None = None
    """Keyword arguments of a function that yields them. Unset: those of `tasks.args` where the source is the same."""

    split: str | None = Field(default=None, min_length=1)
    """Only rows of this split are played. Unset: all rows of the source."""

    max_tasks: int = Field(default=512, ge=1)
    """At most this many tasks, spread evenly over the source."""

    episodes: int = Field(default=1, ge=1)
    """Episodes of each task. More than one says something only when they are sampled."""

    greedy: bool = True
    """Take the likeliest token each time; otherwise sample as in training."""

    label_field: str = Field(default="tier", min_length=1)
    """The field of a row by which results are told apart."""

    policy: Literal["own", "shared"] = "own"
    """During training. `own`: a policy server for evaluation alone, with the weights of a checkpoint: the version is pinned, and
    training is never asked. `shared`: the run's own server, at whatever step, with no second copy of the model; the part of the
    tasks that were played by one version alone is told."""

    workers: int = Field(default=1, ge=1)
    """Worker processes of the evaluation, beside those of training."""

    concurrency: int = Field(default=64, ge=1)
    """Tasks that are played at the same time: the evaluation's own budget."""

    final_wait_s: float = Field(default=120.0, ge=0)
    """How long the end of training waits for the last measurement."""

    def tasks_config(self, tasks: TasksConfig) -> TasksConfig:
        """The training tasks' config, with what differs."""
        is_same = self.source is None or self.source == tasks.source
        args = self.args if self.args is not None else (tasks.args if is_same else {})
        return TasksConfig(
            source=self.source or tasks.source,
            args=args,
            id_field=tasks.id_field,
            split=self.split,
            split_field=tasks.split_field if self.split is not None else "split",
        )
