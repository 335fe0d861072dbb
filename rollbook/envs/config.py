"""What an operator may set about the world."""

from typing import Any

from pydantic import BaseModel, Field


class EnvConfig(BaseModel, frozen=True, extra="forbid"):
    """The section `[env]` of a run."""

    name: str = Field(default="number_guessing", min_length=1)
    """Which world: a name of the catalog, or `module:Class` for one of your own."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the world's class, the same for every episode. What differs by episode belongs into the task."""

    max_threads: int = Field(default=64, ge=1)
    """Threads for worlds with plain (not async) methods: how many of their calls can run at the same time."""
