"""What an operator may set about tasks: where they come from and in which order they are drawn."""

from typing import Any

from pydantic import BaseModel, Field, model_validator


class TasksConfig(BaseModel, frozen=True, extra="forbid"):
    source: str = Field(min_length=1)
    """A JSONL file (`tasks.jsonl`, relative to the config file) or a Python function (`module:function`) that yields rows."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function. A file takes none."""

    id_field: str = Field(default="id", min_length=1)
    """The field of a row that holds its lasting id. A row without it gets a digest of its content."""

    epochs: int | None = Field(default=None, ge=1)
    """How often every task is drawn. Without it the source is endless, and the run ends by its number of steps."""

    shuffle: bool = True
    """Draw each epoch in an order of its own. Otherwise in the order of the source."""

    seed: int = 0
    """Of the shuffle; epoch e is shuffled by (seed, e)."""

    @property
    def is_function(self) -> bool:
        return not self.source.endswith(".jsonl")

    @model_validator(mode="after")
    def _source_is_one_of_two_kinds(self) -> "TasksConfig":
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
