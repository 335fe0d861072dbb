"""Settings of tasks: their source, and the order in which they are drawn."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

ATROPOS = "atropos"
"""The source `atropos`: Atropos environments post groups, and nothing is drawn here."""


FILE_ENDINGS = (".jsonl", ".csv", ".parquet")
HUB_PREFIX = "hf:"
HARBOR_PREFIX = "harbor:"


def is_file(source: str) -> bool:
    return source.endswith(FILE_ENDINGS) and not is_hub(source) and not is_harbor(source)


def is_hub(source: str) -> bool:
    return source.startswith(HUB_PREFIX)


def is_harbor(source: str) -> bool:
    return source.startswith(HARBOR_PREFIX)


class AtroposSourceConfig(BaseModel, frozen=True, extra="forbid"):
    """Atropos environments as the source of groups. Read with `tasks.source = "atropos"`."""

    url: str | None = None
    """URL of an external server with Atropos's API. Unset: the ledger of this run offers it at `port`."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the ledger on this machine, for the environments' `rollout_server_url`."""

    batch_sequences: int = Field(default=64, ge=1)
    """Sequences in one batch. Environments adapt their pace to it; at least the size of the largest group."""

    max_token_len: int = Field(default=4096, ge=2)
    """Maximum length of a sequence, as reported to the environments."""


class CurriculumConfig(BaseModel, frozen=True, extra="forbid"):
    """Which task is drawn next, by the outcomes of earlier draws. Read with `tasks.order = "curriculum"`."""

    sampler: Literal["mastery", "weighted", "sequential"] = "mastery"
    """How the next open task is chosen: `mastery` by score, `weighted` at random in proportion to the row's weight, `sequential`
    in the order of the source."""

    tier_field: str = Field(default="tier", min_length=1)
    """Field of a row with its tier. If no row has it, all tasks are one tier."""

    tiers: tuple[str | int, ...] = ()
    """The tiers, easiest first. Unset: numbers by size, names by their first row in the source."""

    weight_field: str = Field(default="weight", min_length=1)
    """Field of a row with its weight for the weighted sampler. A row without it has weight 1."""

    draws: int | None = Field(default=None, ge=1)
    """Number of draws in all. Unset: the source is endless, and the run ends by its number of steps."""

    decay: float = Field(default=0.85, gt=0, le=1)
    """Weight of a result relative to the next newer one, in every rate here."""

    task_window: int = Field(default=10, ge=1)
    """Results kept for each task."""

    graduate_rate: float = Field(default=0.7, gt=0, le=1)
    """A task graduates at this rate …"""

    graduate_tries: int = Field(default=3, ge=1)
    """… over at least this many draws."""

    relapse_rate: float = Field(default=0.5, ge=0, le=1)
    """A graduated task whose rate falls below this must graduate again."""

    tier_window: int = Field(default=20, ge=1)
    """Results kept for the highest open tier."""

    promote_rate: float = Field(default=0.7, gt=0, le=1)
    """The next tier opens at this rate …"""

    promote_tries: int = Field(default=10, ge=1)
    """… over at least this many draws of the highest open tier."""

    fast_track_rate: float = Field(default=0.9, gt=0, le=1)
    """The next tier opens sooner at this rate …"""

    fast_track_tries: int = Field(default=3, ge=1)
    """… over at least this many draws. Not for a tier that was closed again."""

    demote_rate: float = Field(default=0.05, ge=0, le=1)
    """The highest open tier is closed again when its rate falls below this …"""

    demote_tries: int = Field(default=20, ge=1)
    """… over at least this many draws of it."""

    novelty: float = Field(default=1.0, ge=0)
    """Score of a task that was never drawn; half of it after one draw, a third after two."""

    weakness: float = Field(default=1.0, ge=0)
    """Score of a task that never succeeds, in proportion to 1 − its rate."""

    repetition: float = Field(default=0.2, gt=0)
    """Score of a task for each draw that it is overdue. In the end this outweighs everything else, so no task starves."""

    recency: float = Field(default=1.0, ge=0)
    """Subtracted from the score of a task that was just drawn; falls to 0 within one round."""

    repeat_after: float = Field(default=2.0, gt=0)
    """Rounds after which a task that just graduated is due again; doubled by each successful review. A round is as many draws
    as there are open tasks."""

    repeat_at_most: float = Field(default=16.0, gt=0)
    """Longest interval, in rounds, after which a graduated task is due."""

    longest_wait: float = Field(default=4.0, gt=0)
    """Rounds after which an open task that has not graduated is due."""

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> "CurriculumConfig":
        for low, high, why in (
            ("relapse_rate", "graduate_rate", "a task would relapse as it graduates"),
            ("demote_rate", "promote_rate", "a tier would open and close at the same rate"),
            ("promote_rate", "fast_track_rate", "the fast track would need a lower rate"),
            ("fast_track_tries", "promote_tries", "the fast track would need more draws"),
            ("graduate_tries", "task_window", "no task could ever graduate"),
            ("promote_tries", "tier_window", "no other tier could ever open"),
            ("demote_tries", "tier_window", "no tier could ever be closed again"),
            ("repeat_after", "repeat_at_most", "the first interval would be longer than the longest"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is above {high} = {getattr(self, high)}: {why}")
        if len(set(self.tiers)) != len(self.tiers):
            raise ValueError(f"tiers contains a tier twice: {', '.join(map(str, self.tiers))}")
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


class HubConfig(BaseModel, frozen=True, extra="forbid"):
    """A dataset of the Hugging Face Hub as the source. Read with `tasks.source = "hf:NAME"`."""

    subset: str | None = Field(default=None, min_length=1)
    """Name of the subset (`main` of openai/gsm8k)."""

    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit. Set a commit for a run that can be repeated."""

    streaming: bool = False
    """Read rows over the network instead of downloading the dataset. Useful with `tasks.limit`."""


class TasksConfig(BaseModel, frozen=True, extra="forbid"):
    source: str = Field(min_length=1)
    """A file (`tasks.jsonl`, `.csv` or `.parquet`, relative to the config file), a Python function (`module:function`) that yields
    rows, a dataset of the Hugging Face Hub or a local dataset directory (`hf:openai/gsm8k`, see `[tasks.hub]`), a directory of
    Harbor tasks (`harbor:DIR`), or `atropos`: Atropos environments post whole groups, see `[tasks.atropos]`."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Fields of a row, each with its column in the source: `{ question = "problem" }`. Others are left out. Unset: all columns."""

    limit: int | None = Field(default=None, ge=1)
    """Only the first this many rows of the source. `rollbook train --max-rows` sets it."""

    hub: HubConfig = HubConfig()

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    id_field: str = Field(default="id", min_length=1)
    """Field of a row with its permanent id. A row without it gets a digest of its content as id."""

    split: str | None = Field(default=None, min_length=1)
    """Only rows of this split are drawn (`train`); then every row must name its split. Unset: all rows are drawn except those of
    `evaluation.split`. With a dataset of the hub, one of its splits; unset: `train`."""

    split_field: str = Field(default="split", min_length=1)
    """Field of a row with its split."""

    order: Literal["cursor", "curriculum"] = "cursor"
    """`cursor`: epoch by epoch. `curriculum`: by the outcomes of earlier draws, see `[tasks.curriculum]`."""

    epochs: int | None = Field(default=None, ge=1)
    """How often every task is drawn. Unset: the source is endless, and the run ends by its number of steps. A curriculum has no
    epochs."""

    shuffle: bool = True
    """Shuffle each epoch. Otherwise tasks are drawn in the order of the source. A curriculum does not shuffle."""

    seed: int = 0
    """Seed of the shuffle; epoch e is shuffled by (seed, e). In a curriculum, seed of the random choices."""

    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)

    atropos: AtroposSourceConfig = AtroposSourceConfig()

    @property
    def is_posted(self) -> bool:
        """Whether Atropos environments play the groups and post them."""
        return self.source == ATROPOS

    @property
    def is_function(self) -> bool:
        return not (is_file(self.source) or is_hub(self.source) or is_harbor(self.source))

    @property
    def is_endless(self) -> bool:
        return (self.epochs if self.order == "cursor" else self.curriculum.draws) is None

    @model_validator(mode="after")
    def _every_field_is_read(self) -> "TasksConfig":
        # Compare values: a resolved config, which names every field, must load again.
        if not is_hub(self.source) and self.hub != HubConfig():
            raise ValueError('hub is read only with source = "hf:NAME"; set that or remove the table')
        if not self.is_posted and self.atropos != AtroposSourceConfig():
            raise ValueError('atropos is read only with source = "atropos"; set that or remove the table')
        if self.is_posted and (
            self.args
            or self.columns
            or self.order != "cursor"
            or any(value is not None for value in (self.epochs, self.split, self.limit))
        ):
            raise ValueError(
                'with source = "atropos" no tasks are drawn here: args, columns, order, epochs, split and limit are not read'
            )
        if self.order == "cursor" and self.curriculum != CurriculumConfig():
            raise ValueError('curriculum is read only with order = "curriculum"; set that or remove the table')
        if self.order == "curriculum" and self.epochs is not None:
            raise ValueError("epochs is read by the cursor only; a curriculum ends by curriculum.draws or never")
        if self.order == "curriculum" and not self.shuffle:
            raise ValueError(
                'shuffle is read by the cursor only; for the order of the source set curriculum.sampler = "sequential"'
            )
        return self

    @model_validator(mode="after")
    def _source_has_a_known_form(self) -> "TasksConfig":
        if self.is_posted:
            return self
        if self.is_function:
            module, colon, function = self.source.partition(":")
            if not (module and colon and function.isidentifier()):
                raise ValueError(
                    f"source {self.source!r} is no file that ends in {', '.join(FILE_ENDINGS)}, no dataset (hf:NAME), no "
                    f"directory of tasks (harbor:DIR) and no function (module:function)"
                )
        elif self.args:
            raise ValueError(
                f"source {self.source!r} is no function and takes no args; remove {', '.join(sorted(self.args))}"
            )
        return self
