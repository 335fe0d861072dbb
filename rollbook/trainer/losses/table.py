"""Name to loss: one explicit table."""

from rollbook.trainer.losses.clipped import clipped_ratio
from rollbook.trainer.losses.inputs import Loss

LOSSES: dict[str, Loss] = {"grpo": clipped_ratio}
