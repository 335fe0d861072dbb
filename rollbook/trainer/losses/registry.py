"""The table of losses by name. `trainer/loss_defaults.py` lists the settings each one reads."""

from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.user_errors import describe_error
from rollbook.trainer.losses.clipped import clipped_importance, clipped_ratio, clipped_sequence_ratio, decoupled_clip
from rollbook.trainer.losses.inputs import Loss, LossInputs, LossSettings, LossTerms
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
    return _fenced(load_plugin(name, setting="trainer.loss"), name)


def _fenced(loss: Loss, name: str) -> Loss:
    """A user's loss. An exception or a result of the wrong shape stops the run: another attempt would fail in the same way."""

    def compute(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        try:
            terms = loss(inputs, settings)
        except RollbookError:
            raise
        except Exception as error:
            raise RunError(f"trainer.loss = {name!r} raised {describe_error(error)}") from error
        if not isinstance(terms, LossTerms):
            raise RunError(f"trainer.loss = {name!r} returned a {type(terms).__name__}; it must return LossTerms")
        expected = tuple(inputs.current_N.shape)
        for field in ("loss_N", "is_clipped_N"):
            if (shape := tuple(getattr(terms, field).shape)) != expected:
                raise RunError(f"trainer.loss = {name!r} returned {field} of shape {shape}; it must be {expected}")
        return terms

    return compute
