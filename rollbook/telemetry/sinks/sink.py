"""What a sink is, and the table of those there are."""

import importlib
from pathlib import Path
from typing import Any, Protocol

from rollbook.telemetry.config import TelemetryConfig


class Sink(Protocol):
    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        """Show what one process measured up to trainer step `step`."""

    def close(self) -> None: ...


class SinkModule(Protocol):
    def open_sink(self, config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> Sink:
        """`directory` is the run's; `settings` its resolved configuration, for whoever shows it."""


SINKS: dict[str, str] = {
    "tensorboard": "rollbook.telemetry.sinks.tensorboard",
    "wandb": "rollbook.telemetry.sinks.wandb",
}


def open_sinks(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> dict[str, Sink]:
    """Only the libraries of the chosen ones are imported. Raises `ImportError` where one is not installed."""
    opened: dict[str, Sink] = {}
    for name in config.sinks:
        try:
            module: Any = importlib.import_module(SINKS[name])
        except ImportError as error:
            raise ImportError(
                f"telemetry.sinks names {name}, and its library is not installed ({error}): pip install 'rollbook[{name}]'"
            ) from error
        opened[name] = module.open_sink(config, directory=directory, run_name=run_name, settings=settings)
    return opened
