"""What an environment returns to an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of a reset or a step. `facts` are for people and are never shown to the agent."""

    text: str
    reward: float = 0.0
    """The reward of this step."""
    done: bool = False
    solved: bool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
