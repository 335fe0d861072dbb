"""The table of losses by name. `trainer/loss_defaults.py` lists the settings each one reads."""

from rollbook.contracts.plugin import load_plugin
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
    loss: Loss = load_plugin(name, setting="trainer.loss")
    return loss
