"""What an operator may set about tasks: where they come from and in which order they are drawn."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rollbook.tasks.curriculum_config import CurriculumConfig

ATROPOS = "atropos"
"""As a source: nothing is drawn here, environments of Atropos post the groups."""


class AtroposSourceConfig(BaseModel, frozen=True, extra="forbid"):
    """Atropos environments as the source of groups. Read with `tasks.source = "atropos"`."""

    url: str | None = None
    """A server that speaks Atropos's API, elsewhere. Unset: the ledger of this run does, at `port`."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Where environments reach the ledger of this run, on this machine: their `rollout_server_url`."""

    batch_sequences: int = Field(default=64, ge=1)
    """Sequences fetched together. Environments steer their pace by it; at least the size of the largest group."""

    max_token_len: int = Field(default=4096, ge=2)
    """What environments are told about the length of a sequence."""


class TasksConfig(BaseModel, frozen=True, extra="forbid"):
    source: str = Field(min_length=1)
    """A JSONL file (`tasks.jsonl`, relative to the config file) or a Python function (`module:function`) that yields rows; or
    `atropos`: environments of Atropos post whole groups, see `[tasks.atropos]`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function. A file takes none."""

    id_field: str = Field(default="id", min_length=1)
    """The field of a row that holds its lasting id. A row without it gets a digest of its content."""

    split: str | None = Field(default=None, min_length=1)
    """Only rows of this split are drawn (`train`); every row must then say its own. Without it all rows are."""

    split_field: str = Field(default="split", min_length=1)
    """The field of a row that names its split."""

    order: Literal["cursor", "curriculum"] = "cursor"
    """`cursor`: epoch by epoch. `curriculum`: by what came of earlier draws, see `[tasks.curriculum]`."""

    epochs: int | None = Field(default=None, ge=1)
    """How often every task is drawn. Without it the source is endless, and the run ends by its number of steps. A curriculum has
    no epochs."""

    shuffle: bool = True
    """Draw each epoch in an order of its own. Otherwise in the order of the source. A curriculum does not shuffle."""

    seed: int = 0
    """Of the shuffle; epoch e is shuffled by (seed, e). In a curriculum, of the choice among equals."""

    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)

    atropos: AtroposSourceConfig = AtroposSourceConfig()

    @property
    def is_posted(self) -> bool:
        """Whether others play, and post what came of it."""
        return self.source == ATROPOS

    @property
    def is_function(self) -> bool:
        return not self.source.endswith(".jsonl")

    @property
    def is_endless(self) -> bool:
        return (self.epochs if self.order == "cursor" else self.curriculum.draws) is None

    @model_validator(mode="after")
    def _every_field_is_read(self) -> "TasksConfig":
        # By value: a resolved config, which names every field, must load again.
        if self.split is None and self.split_field != "split":
            raise ValueError(
                f"split_field = {self.split_field!r} is read only when split is set; set it or remove this"
            )
        if not self.is_posted and self.atropos != AtroposSourceConfig():
            raise ValueError('atropos is read only with source = "atropos"; set that or remove the table')
        if self.is_posted and (
            self.args or self.order != "cursor" or self.epochs is not None or self.split is not None
        ):
            raise ValueError(
                'with source = "atropos" others draw the tasks: args, order, epochs and split are not read'
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
    def _source_is_one_of_two_kinds(self) -> "TasksConfig":
        if self.is_posted:
            return self
        if self.is_function:
            module, colon, function = self.source.partition(":")
            if not (module and colon and function.isidentifier()):
                raise ValueError(
                    f"source {self.source!r} is neither a file that ends in .jsonl nor a function written as module:function"
                )
        elif self.args:
            raise ValueError(
                f"source {self.source!r} is a file and takes no args; remove {', '.join(sorted(self.args))}"
            )
        return self
