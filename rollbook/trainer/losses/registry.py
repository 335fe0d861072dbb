"""Name to loss: one explicit table. What each reads, and its own values, stand in `OWN_SETTINGS` of `trainer/config.py`."""

from rollbook.contracts.plugin import load_plugin
from rollbook.trainer.losses.cispo import clipped_importance
from rollbook.trainer.losses.clipped import clipped_ratio, clipped_sequence_ratio
from rollbook.trainer.losses.decoupled import decoupled_clip
from rollbook.trainer.losses.dro import direct_reward
from rollbook.trainer.losses.inputs import Loss
from rollbook.trainer.losses.policy_gradient import importance_sampling, reinforce

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
    """A loss of the table, or one's own as `package.module:function`."""
    if ":" not in name:
        return LOSSES[name]
    loss: Loss = load_plugin(name, setting="trainer.loss")
    return loss
