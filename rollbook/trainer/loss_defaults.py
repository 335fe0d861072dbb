"""The settings each loss reads, with its default values. Needs no torch.

A loss is one function in `losses/registry.py`, one line in its table and one line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

CLIPPED: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
# Without a ratio to the policy that sampled, training on groups with a lag of a few versions can collapse (decision 0019).
TO_SAMPLER: dict[str, Any] = {"old_logprobs": "engine"}

LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {**CLIPPED, **TO_SAMPLER},
    "dr_grpo": {**CLIPPED, **TO_SAMPLER, "advantage": "dr_grpo", "reduction": "fixed_length"},
    "dapo": {**CLIPPED, **TO_SAMPLER, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {**CLIPPED, **TO_SAMPLER, "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {**TO_SAMPLER, "clip_low": 1.0, "clip_high": 4.0},
    "importance_sampling": TO_SAMPLER,
    "reinforce": {},
    "decoupled": {**CLIPPED, "behaviour_cap": None},
    "dro": {"dro_beta": 0.1},
}
"""Name of a loss to the settings it reads, with their defaults (None: off). Settings not listed here are rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The effective loss settings of a step. None: the loss does not use it."""

    loss: str
    old_logprobs: str
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
