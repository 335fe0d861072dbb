"""Settings of external metric sinks."""

from typing import Literal

from pydantic import BaseModel, Field


class TelemetryConfig(BaseModel, frozen=True, extra="forbid"):
    """Further destinations of metrics. `metrics.jsonl` in the run directory is always written."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """`tensorboard`: event files in `tensorboard/` of the run directory. `wandb`: Weights & Biases. Each needs the extra of the
    same name."""

    wandb_project: str = Field(default="rollbook", min_length=1)
    """W&B project of the run."""

    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` of the run directory; upload it later with `wandb sync`."""
