"""The observation that an environment returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of a reset or a step. `reward` is the reward of this step; `facts` are for the viewer, never for the agent."""

    text: str
    reward: float = 0.0
    done: bool = False
    solved: bool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
