"""The learning rate as a pure function of the step: there is no scheduler state that a resume could get wrong."""

import math

from rollbook.trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Rate for batch `step` (1, 2, ...): linear warm-up, then constant or falling to 0 just after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or config.max_steps is None:
        return config.lr
    done = (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    done = min(1.0, done)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
