"""May this configuration go on with that run? Says which settings stand in the way."""

from typing import Any

from rollbook.run.config.run import ConfigError, ConfigFault, RunConfig, changed_fields

# What the ledger's record was made with. Changing one of these would make the record mean something else.
FROZEN = (
    "run.name",
    "run.seed",
    "model",
    "tasks",
    "gate.groups_per_step",
    "gate.max_head_offpolicy_versions",
    "gate.batch_policy",
)


def check_resume(stored: RunConfig, wanted: RunConfig, *, source: str) -> dict[str, tuple[Any, Any]]:
    """What changed, if the run may go on with it; `ConfigError` otherwise.

    Settings of the trainer that alter its numbers are judged by the trainer itself: it knows whether steps would be replayed.
    """
    changed = changed_fields(stored, wanted)
    faults = [
        ConfigFault(path, f"is {new!r} here and was {old!r} when this run began; start a new run for that")
        for path, (old, new) in changed.items()
        if any(path == frozen or path.startswith(f"{frozen}.") for frozen in FROZEN)
    ]
    if faults:
        raise ConfigError(source, faults)
    return changed
