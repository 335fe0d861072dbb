"""Another loss on the same recorded stream: which settings it means, and how both are shown side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import override_table
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loss_defaults import LOSS_DEFAULTS
from rollbook.trainer.replay import CounterfactualStep

LOSS_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "dro_beta",
    "behaviour_cap",
    "loss_options",
    "advantage",
    "reduction",
)
"""What belongs to a loss: another one begins with its own values, not with those of the recorded one."""
MEASURES = {
    "gain": "gain over the sampler before learning from the batch: mean of A (log π − log μ)",
    "train/entropy": "entropy (nats)",
    "train/mean_kl": "divergence from the sampler (nats)",
    "train/ess": "effective sample size of the record (part of its tokens)",
    "train/grad_norm": "gradient norm",
}


def other_recipe(recorded: TrainerConfig, loss: str | None, overrides: Sequence[str]) -> TrainerConfig:
    """The recorded settings with another loss and `trainer.…` overrides. Raises `RunError` naming what does not fit."""
    table: dict[str, Any] = {"trainer": recorded.model_dump(mode="json", exclude_none=True)}
    if loss is not None and loss != recorded.loss:
        for name in (*LOSS_SETTINGS, "reduction_length"):
            table["trainer"].pop(name, None)
        table["trainer"]["loss"] = loss
        if loss == "decoupled":
            table["trainer"].pop("correction", None)
    faults = [str(fault) for text in overrides if (fault := override_table(table, text)) is not None]
    strays = sorted(table.keys() - {"trainer"})
    faults += [f"{name}: only settings of [trainer] can be replayed; the rest is in the record" for name in strays]
    try:
        config = TrainerConfig.model_validate(table["trainer"])
    except ValidationError as error:
        known = f" (losses: {', '.join(LOSS_DEFAULTS)})"
        faults += [f"trainer.{'.'.join(map(str, e['loc']))}: {e['msg']}{known}" for e in error.errors()]
        raise RunError("; ".join(faults)) from error
    if faults:
        raise RunError("; ".join(faults))
    return config


def curves(steps: Sequence[CounterfactualStep]) -> dict[str, list[float | None]]:
    return {name: [step.gain if name == "gain" else step.metrics.get(name) for step in steps] for name in MEASURES}


def table_of(both: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[dict[str, Any]]:
    """For each measure and each way of training: mean over the first and over the last tenth of the steps."""
    rows = []
    for measure in MEASURES:
        row: dict[str, Any] = {"measure": measure}
        for name, lines in both.items():
            known = [value for value in lines[measure] if value is not None]
            tenth = max(1, len(known) // 10)
            row[name] = [_mean(known[:tenth]), _mean(known[-tenth:])]
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None
