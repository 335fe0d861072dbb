"""Settings of a replay: the recorded ones with another loss, another advantage, or other fields of `[trainer]`."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import override_table
from rollbook.run.config.suggestions import plain_message
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loss_settings import LOSS_NUMBERS

ADVANTAGE_SETTINGS = ("turn_discount", "gigpo_weight", "reward_weights")
LOSS_SETTINGS = (
    *LOSS_NUMBERS,
    "loss_options",
    "advantage",
    *ADVANTAGE_SETTINGS,
    "reduction",
)
"""Settings of a loss. Another loss starts with its own defaults, not with the recorded values."""


def changed_settings(
    recorded: TrainerConfig, loss: str | None, overrides: Sequence[str], *, advantage: str | None = None
) -> TrainerConfig:
    """The recorded settings with another loss, advantage and `trainer.…` overrides. Raises `RunError` with every fault.

    `trainer.loss` and `trainer.advantage` among the overrides are the same as `loss` and `advantage`.
    """
    named: dict[str, Any] = {}
    faults = [str(fault) for text in overrides if (fault := override_table(named, text)) is not None]
    faults += [
        f"{name}: only settings of [trainer] can be changed in a replay" for name in sorted(named) if name != "trainer"
    ]
    own = named.get("trainer", {})
    loss, advantage = own.get("loss", loss), own.get("advantage", advantage)
    table: dict[str, Any] = {"trainer": recorded.model_dump(mode="json", exclude_none=True)}
    if loss is not None and loss != recorded.loss:
        for name in (*LOSS_SETTINGS, "reduction_length"):
            table["trainer"].pop(name, None)
        table["trainer"]["loss"] = loss
        if recorded.distill_coef is None and loss != "distill":
            # Settings of a divergence that the recorded loss trained by default.
            for name in ("distill_kl", "distill_until"):
                table["trainer"].pop(name, None)
        if loss == "decoupled":
            table["trainer"].pop("correction", None)
    if advantage is not None and advantage != recorded.advantage:
        for name in ADVANTAGE_SETTINGS:
            table["trainer"].pop(name, None)
        table["trainer"]["advantage"] = advantage
    if not faults:
        for text in overrides:
            override_table(table, text)
    try:
        config = TrainerConfig.model_validate(table["trainer"])
    except ValidationError as error:
        faults += [
            f"{'.'.join(['trainer', *map(str, e['loc'])])}: {plain_message(e, e['loc'], TrainerConfig)}"
            for e in error.errors()
        ]
    if faults:
        raise RunError("; ".join(faults))
    return config
