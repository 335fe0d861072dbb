"""Settings of external metric sinks."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from rollbook.access.guard import is_loopback
from rollbook.contracts.user_errors import did_you_mean

SINKS = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus", "opentelemetry")
"""Each is a module of `telemetry/sinks` with `open_sink`, and an extra of this package."""


class TelemetryConfig(BaseModel, frozen=True, extra="forbid"):
    """Additional destinations of metrics. `metrics.jsonl` in the run directory is always written."""

    sinks: tuple[str, ...] = ()
    """`tensorboard`: event files in `tensorboard/` of the run directory. `wandb`: Weights & Biases. `trackio`: Trackio. `mlflow`:
    an MLflow server, or `mlruns/` of the run directory. `prometheus`: an endpoint with the latest values. `opentelemetry`: traces
    over OTLP. Each needs the extra of the same name; `prometheus` needs none. Or your own, as package.module:function. See
    docs/training.md."""

    rollouts_per_step: int = Field(default=4, ge=0)
    """Samples of each step that are written to `rollouts.jsonl` with text, reward and advantage. Sinks show them as tables."""

    token_records: int = Field(default=50, ge=0)
    """Every how many steps the trainer records its logprob, the entropy and the advantage of each trained token, for the dashboard.
    Such a step needs one more pass without gradients. 0: never. With several ranks nothing is recorded."""

    token_records_kept: int = Field(default=10, ge=1)
    """How many of these records are kept, the newest. Each has 12 bytes per token of its batch."""

    wandb_project: str | None = None
    """W&B project of the run. Default: `WANDB_PROJECT`, or `rollbook`."""

    wandb_entity: str | None = None
    """W&B user or team. Default: `WANDB_ENTITY`."""

    wandb_group: str | None = None
    """W&B group. Default: `WANDB_RUN_GROUP`."""

    wandb_tags: tuple[str, ...] = ()
    """W&B tags. Default: `WANDB_TAGS`."""

    wandb_mode: Literal["online", "offline"] | None = None
    """`offline` writes to `wandb/` of the run directory; upload it later with `wandb sync`. Default: `WANDB_MODE`, or `online`."""

    prometheus_host: str = "127.0.0.1"
    """Address that the `prometheus` sink listens on."""

    prometheus_port: int = Field(default=9464, ge=0, le=65535)
    """Port that the `prometheus` sink listens on. 0 chooses a free one."""

    prometheus_token_file: Path | None = None
    """File with the token that Prometheus must send (`authorization.credentials_file` of its scrape configuration), relative to the
    run directory. Created if missing. Required if `prometheus_host` is not a loopback address."""

    @field_validator("sinks")
    @classmethod
    def _check_sinks(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        for name in sinks:
            if ":" not in name and name not in SINKS:
                raise ValueError(
                    f"unknown sink {name!r}: use {', '.join(SINKS)}, or your own as package.module:function"
                    f"{did_you_mean(name, SINKS)}"
                )
        return sinks

    @model_validator(mode="after")
    def _check_prometheus_token(self) -> Self:
        if not is_loopback(self.prometheus_host) and self.prometheus_token_file is None:
            raise ValueError(
                f"prometheus_host {self.prometheus_host} can be reached from other machines: set prometheus_token_file"
            )
        return self
