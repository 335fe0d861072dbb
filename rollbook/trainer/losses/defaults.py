"""What each loss reads, and which values it has of its own: the part of the table of losses that needs no tensors.

A loss is one function (`losses/`), one line in `losses/table.py` and one line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

CLIPPED: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}

OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": CLIPPED,
    "dr_grpo": {**CLIPPED, "advantage": "dr_grpo", "reduction": "fixed_length"},
    "dapo": {**CLIPPED, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {**CLIPPED, "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "importance_sampling": {},
    "reinforce": {},
    "decoupled": {**CLIPPED, "behaviour_cap": None},
    "dro": {"dro_beta": 0.1},
}
"""Name of a loss to what it reads, with its own value (None: without). Settings that are not named here are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a step computes: `trainer.*` with nothing left open. None where the loss does without."""

    loss: str
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    dro_beta: float | None
    behaviour_cap: float | None
    loss_options: Mapping[str, float]
    advantage: str
    reduction: str
    correction_level: str
    correction_bound: float
    overlong_buffer: int
    overlong_penalty: float

    def as_settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
