"""The run to predict: its sizes, which a simulation varies, and its other settings, which are compared with those of a trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollbook.contracts.freshness import FreshnessRule

SIMULATED = frozenset(
    {
        "gate.groups_per_step",
        "gate.max_groups_in_flight",
        "gate.max_head_offpolicy_versions",
        "gate.batch_policy",
        "gate.admission_share",
        "rollout.workers",
        "rollout.groups_per_worker",
        "rollout.completions_per_prompt",
        "rollout.quorum",
        "inference.replicas",
    }
)
"""Settings whose effect is simulated."""
WITHOUT_EFFECT = (
    "run.",
    "telemetry.",
    "evaluation.",
    "trainer.max_steps",
    "trainer.lr",
    "tasks.seed",
    "inference.seed",
)
"""Settings without an effect on durations. Every other difference from the trace is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The sizes of a run that a simulation varies."""

    rule: FreshnessRule
    samples_per_group: int
    slots: int
    """Groups that all workers can play at the same time."""
    workers: int = 1
    replicas: int = 1
    replicas_per_device: int = 1
    """Replicas that share a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredRun:
    """What a simulation needs to know of the configuration of a run."""

    setting: Setting
    has_members: bool = False
    """Other machines may join the run."""
    values: Mapping[str, Any]
    """Every setting by its path, such as `inference.device`."""

    def unsimulated_changes(self, traced: "ConfiguredRun") -> set[str]:
        """Paths that differ from those of a traced run and may change durations in a way that is not simulated."""
        return {
            path
            for path in self.values.keys() | traced.values.keys()
            if self.values.get(path) != traced.values.get(path)
            and path not in SIMULATED
            and not path.startswith(WITHOUT_EFFECT)
        }
