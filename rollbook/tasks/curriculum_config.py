"""What an operator may set about the curriculum: the table `[tasks.curriculum]`, read when `tasks.order = "curriculum"`."""

from typing import Literal

from pydantic import BaseModel, Field, model_validator


class CurriculumConfig(BaseModel, frozen=True, extra="forbid"):
    sampler: Literal["mastery", "weighted", "sequential"] = "mastery"
    """Who chooses among the open tasks: `mastery` by score, `weighted` by chance in proportion to the row's weight, `sequential`
    in the order of the source."""

    tier_field: str = Field(default="tier", min_length=1)
    """The field of a row that names its tier. When no row has it, all tasks are one tier."""

    tiers: tuple[str | int, ...] = ()
    """The tiers, easiest first. Without it: numbers by size, names by their first row in the source."""

    weight_field: str = Field(default="weight", min_length=1)
    """The field of a row that holds its weight for the weighted sampler. A row without it weighs 1."""

    draws: int | None = Field(default=None, ge=1)
    """How many draws there are in all. Without it the source is endless, and the run ends by its number of steps."""

    decay: float = Field(default=0.85, gt=0, le=1)
    """How much less a result weighs than the one after it, in every rate here."""

    task_window: int = Field(default=10, ge=1)
    """Results remembered of a task."""

    graduate_rate: float = Field(default=0.7, gt=0, le=1)
    """A task graduates at this rate …"""

    graduate_tries: int = Field(default=3, ge=1)
    """… over at least this many draws."""

    relapse_rate: float = Field(default=0.5, ge=0, le=1)
    """A graduated task whose rate falls below this must graduate again."""

    tier_window: int = Field(default=20, ge=1)
    """Results remembered of the highest open tier."""

    promote_rate: float = Field(default=0.7, gt=0, le=1)
    """The next tier opens at this rate …"""

    promote_tries: int = Field(default=10, ge=1)
    """… over at least this many draws of the highest open tier."""

    fast_track_rate: float = Field(default=0.9, gt=0, le=1)
    """The next tier opens sooner at this rate …"""

    fast_track_tries: int = Field(default=3, ge=1)
    """… over at least this many draws. Not after a tier was left again: then by the long way only."""

    demote_rate: float = Field(default=0.05, ge=0, le=1)
    """The highest open tier is closed again when its rate falls below this …"""

    demote_tries: int = Field(default=20, ge=1)
    """… over at least this many draws of it."""

    novelty: float = Field(default=1.0, ge=0)
    """Score of a task that was never drawn; half of it after one draw, a third after two."""

    weakness: float = Field(default=1.0, ge=0)
    """Score of a task that never succeeds, in proportion to 1 − its rate."""

    repetition: float = Field(default=0.2, gt=0)
    """Score of a task for each draw that it is overdue. What is overdue for long outweighs everything else: nothing starves."""

    recency: float = Field(default=1.0, ge=0)
    """Taken off the score of a task that was just drawn; nothing is left of it after one round."""

    repeat_after: float = Field(default=2.0, gt=0)
    """Rounds after which a task that just graduated is due again; doubled by each review that goes well. A round is as many
    draws as there are open tasks."""

    repeat_at_most: float = Field(default=16.0, gt=0)
    """Rounds after which a graduated task is due, however well its reviews went."""

    longest_wait: float = Field(default=4.0, gt=0)
    """Rounds after which an open task that has not graduated is due."""

    @model_validator(mode="after")
    def _marks_are_in_order(self) -> "CurriculumConfig":
        for low, high, why in (
            ("relapse_rate", "graduate_rate", "a task would relapse as it graduates"),
            ("demote_rate", "promote_rate", "a tier would be promoted past and left at the same rate"),
            ("promote_rate", "fast_track_rate", "the fast track would be the easy one"),
            ("fast_track_tries", "promote_tries", "the fast track would be the slow one"),
            ("graduate_tries", "task_window", "no task could ever graduate"),
            ("promote_tries", "tier_window", "no tier could ever be promoted past"),
            ("demote_tries", "tier_window", "no tier could ever be left"),
            ("repeat_after", "repeat_at_most", "the first repetition would come after the last"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is above {high} = {getattr(self, high)}: {why}")
        if len(set(self.tiers)) != len(self.tiers):
            raise ValueError(f"tiers names one twice: {', '.join(map(str, self.tiers))}")
        return self

    @model_validator(mode="after")
    def _every_field_is_read(self) -> "CurriculumConfig":
        by_score = ("novelty", "weakness", "repetition", "recency", "repeat_after", "repeat_at_most", "longest_wait")
        unread = () if self.sampler == "mastery" else by_score
        unread = unread if self.sampler == "weighted" else (*unread, "weight_field")
        changed = [name for name in unread if getattr(self, name) != type(self).model_fields[name].default]
        if changed:
            raise ValueError(f"sampler = {self.sampler!r} does not read {', '.join(changed)}; remove them")
        return self
