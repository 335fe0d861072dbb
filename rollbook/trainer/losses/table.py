"""Name to loss: one explicit table."""

from rollbook.trainer.losses.clipped import clipped_ratio
from rollbook.trainer.losses.inputs import Loss
from rollbook.trainer.losses.reinforce import reinforce

LOSSES: dict[str, Loss] = {"grpo": clipped_ratio, "reinforce": reinforce}
