"""The settings that each loss and each advantage reads, with their defaults, and the effective ones of a run."""

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
    "gspo": {**CLIPPED, **TO_SAMPLER, "clip_low": 0.03, "clip_high": 0.04, "reduction": "sequence_mean"},
    "cispo": {**TO_SAMPLER, "clip_low": 1.0, "clip_high": 4.0},
    "importance_sampling": TO_SAMPLER,
    "reinforce": {},
    "decoupled": {**CLIPPED, "behaviour_cap": None},
    "dro": {"dro_beta": 0.1},
    "gspo_token": {**CLIPPED, **TO_SAMPLER, "clip_low": 0.03, "clip_high": 0.04, "reduction": "sequence_mean"},
    "sapo": {**TO_SAMPLER, "sapo_tau": 1.0, "sapo_tau_negative": 1.05},
    "dppo": {**TO_SAMPLER, "divergence_bound": 0.15},
    "m2po": {**TO_SAMPLER, "m2_bound": 0.04},
    "distill": {**TO_SAMPLER, "advantage": "none", "distill_coef": 1.0},
}
"""Name of a loss to the settings it reads, with their defaults (None: off). Settings not listed here are rejected."""

LOSS_NUMBERS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "dro_beta",
    "behaviour_cap",
    "sapo_tau",
    "sapo_tau_negative",
    "divergence_bound",
    "m2_bound",
)
"""Settings that only some losses read."""

ADVANTAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "group": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "maxrl": {},
    "none": {},
    "gdpo": {"reward_weights": None},
    "turn_group": {"turn_discount": 1.0},
    "turn_rloo": {"turn_discount": 1.0},
    "gigpo": {"turn_discount": 0.95, "gigpo_weight": 1.0},
    "producer": {},
}
"""Name of an advantage to the settings it reads, with their defaults. Settings not listed here are rejected."""
OF_WHOLE_GROUPS = frozenset({"gdpo", "turn_group", "turn_rloo", "gigpo"})
"""Advantages that compare all samples of a group, and not those of a part with the rewards of its quorum."""
TURN_ADVANTAGES = frozenset(name for name, reads in ADVANTAGE_DEFAULTS.items() if "turn_discount" in reads)
"""Advantages that differ between the turns of a sample."""


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
    sapo_tau: float | None
    sapo_tau_negative: float | None
    divergence_bound: float | None
    m2_bound: float | None
    loss_options: Mapping[str, float]
    advantage: str
    turn_discount: float | None
    gigpo_weight: float | None
    distill_coef: float
    distill_kl: str
    reduction: str
    correction_level: str
    correction_bound: float
    correction_low: float | None
    kl_estimator: str | None
    overlong_buffer: int
    overlong_penalty: float

    @property
    def has_own_advantage(self) -> bool:
        """`advantage` is a user's function."""
        return ":" in self.advantage

    def as_settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
