"""Checks whether a run can continue with a changed configuration."""

from typing import Any

from rollbook.contracts.freshness import BatchPolicy
from rollbook.run.config.run import ConfigError, ConfigFault, RunConfig, changed_fields

# The ledger's record depends on these settings; a change would invalidate it.
FROZEN = (
    "run.name",
    "run.seed",
    "model",
    "tasks",
    "gate.groups_per_step",
    "gate.max_head_offpolicy_versions",
    "gate.batch_policy",
    "gate.admission_share",
    "rollout.quorum",
)
FROZEN_IN_PARTS = ("rollout.completions_per_prompt",)
"""With batch policy `parts` the gate counts samples, so the size of a group is part of the record."""


def check_resume(stored: RunConfig, wanted: RunConfig, *, source: str) -> dict[str, tuple[Any, Any]]:
    """The changed settings, if the run can continue with them; else raises `ConfigError`.

    The trainer itself checks the settings that alter its numbers: it knows whether steps would be replayed.
    """
    changed = changed_fields(stored, wanted)
    fixed = FROZEN + (FROZEN_IN_PARTS if stored.gate.batch_policy is BatchPolicy.PARTS else ())
    faults = [
        ConfigFault(path, f"is {new!r} here and was {old!r} when this run began; start a new run for that")
        for path, (old, new) in changed.items()
        if any(path == frozen or path.startswith(f"{frozen}.") for frozen in fixed)
    ]
    if faults:
        raise ConfigError(source, faults)
    return changed
