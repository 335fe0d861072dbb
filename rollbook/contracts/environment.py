"""What an agent sees of an environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer to a reset or a step. `reward` is this step's; `facts` are for the viewer, never for the agent."""

    text: str
    reward: float = 0.0
    done: bool = False
    solved: bool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
