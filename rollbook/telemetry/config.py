"""Where metrics go beside the run directory."""

from typing import Literal

from pydantic import BaseModel, Field


class TelemetryConfig(BaseModel, frozen=True, extra="forbid"):
    """`metrics.jsonl` in the run directory is always written; these are further readers of it."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """`tensorboard`: event files in `tensorboard/` of the run directory. `wandb`: Weights & Biases. Each needs its
    extra, which has the same name."""

    wandb_project: str = Field(default="rollbook", min_length=1)
    """Project the run is shown in, where `wandb` is among the sinks."""

    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` of the run directory, to be sent later with `wandb sync`."""
