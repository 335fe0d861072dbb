"""The table of losses by name. `trainer/loss_defaults.py` lists the settings each one reads."""

import importlib

from rollbook.contracts.errors import RunError
from rollbook.trainer.losses.clipped import clipped_importance, clipped_ratio, clipped_sequence_ratio, decoupled_clip
from rollbook.trainer.losses.inputs import Loss
from rollbook.trainer.losses.policy_gradient import direct_reward, importance_sampling, reinforce

LOSSES: dict[str, Loss] = {
    "grpo": clipped_ratio,
    "dr_grpo": clipped_ratio,
    "dapo": clipped_ratio,
    "gspo": clipped_sequence_ratio,
    "cispo": clipped_importance,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "decoupled": decoupled_clip,
    "dro": direct_reward,
}


def loss_named(name: str) -> Loss:
    """A built-in loss, or the user's own as `package.module:function`."""
    if ":" not in name:
        return LOSSES[name]
    module_name, function_name = name.split(":", 1)
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"trainer.loss = {name!r} cannot be imported ({type(error).__name__}: {error})."
            " Name a function as package.module:function, in a package that is installed or on PYTHONPATH."
        ) from error
    if not callable(found):
        raise RunError(f"trainer.loss = {name!r} is no function but a {type(found).__name__}")
    loss: Loss = found
    return loss
