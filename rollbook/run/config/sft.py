"""The config of `rollbook sft`: `[run]`, `[model]`, `[sft]` and the fields of `[trainer]` that apply."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from rollbook.run.config.run import (
    ConfigError,
    ConfigFault,
    RunSection,
    located,
    other_kind,
    read_table,
    without_auto,
)
from rollbook.run.config.suggestions import plain_message
from rollbook.run.directory import RunDirectory, RunDirectoryError, files_meant
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model_config import ModelConfig
from rollbook.trainer.sft_config import SftConfig, unread_settings

FINAL = "final"
"""The result inside the output directory: a Hugging Face model, for `model.path` of a run."""
# The epochs end the training; the number of steps for schedules is known once the demonstrations are counted.
MANY_STEPS = 10**9


class SftRunConfig(BaseModel, frozen=True, extra="forbid"):
    run: RunSection = RunSection(name="sft")
    model: ModelConfig
    sft: SftConfig
    trainer: TrainerConfig = TrainerConfig()


@dataclass(frozen=True, slots=True)
class LoadedSftConfig:
    config: SftRunConfig
    table: Mapping[str, Any]
    """The file's contents with overrides. The resolved config would contain fields that `sft` rejects."""
    source_dir: Path

    def with_trainer(self, chosen: Mapping[str, Any]) -> "LoadedSftConfig":
        """With settings of `[trainer]` that were chosen for this machine."""
        config = self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=dict(chosen))})
        table = {**self.table, "trainer": {**self.table.get("trainer", {}), **chosen}}
        return LoadedSftConfig(config, table if chosen else self.table, self.source_dir)

    @property
    def model(self) -> ModelConfig:
        """The model config, with a path relative to the config file made absolute."""
        path = self.config.model.path
        if path is not None and (absolute := self.source_dir / path).is_dir():
            return self.config.model.model_copy(update={"path": str(absolute)})
        return self.config.model


def load_sft_config(path: Path, overrides: Sequence[str] = (), *, source_dir: Path | None = None) -> LoadedSftConfig:
    """Read, override, validate. `path`: a file, or the output directory of a training. Raises `ConfigError` with every fault."""
    if path.is_dir():
        directory = RunDirectory(path.resolve())
        path, source_dir = directory.require_config(), recorded_source_dir(directory)
    table, faults = read_table(path, overrides)
    if (fault := other_kind(table, "sft", path)) is not None:
        raise ConfigError(str(path), located([fault], path, overrides))
    table = without_auto(table)
    home = (source_dir or path.parent).resolve()
    run = table.get("run")
    seed = run.get("seed", 0) if isinstance(run, Mapping) else 0
    trainer = table.get("trainer", {})
    checked = table
    if isinstance(trainer, Mapping):
        faults += [
            ConfigFault(
                f"trainer.{name}", "is not read by `rollbook sft`, which has no rewards and no rollouts; remove it"
            )
            for name in unread_settings(set(trainer))
            if name in TrainerConfig.model_fields
        ]
        checked = {**table, "trainer": {"seed": seed, "max_steps": MANY_STEPS, **trainer}}
    try:
        config = SftRunConfig.model_validate(checked)
    except ValidationError as error:
        faults += [
            ConfigFault(".".join(map(str, e["loc"])), plain_message(e, e["loc"], SftRunConfig)) for e in error.errors()
        ]
        raise ConfigError(str(path), located(faults, path, overrides)) from error
    for name, file in (("data", config.sft.data), ("validation", config.sft.validation)):
        if file is not None and not (home / file).is_file():
            faults.append(ConfigFault(f"sft.{name}", f"no such file: {home / file}"))
    if faults:
        raise ConfigError(str(path), located(faults, path, overrides))
    return LoadedSftConfig(config, table, home)


def recorded_source_dir(directory: RunDirectory) -> Path:
    """The directory of the file with which a training began."""
    try:
        return Path(json.loads(directory.sft_manifest_file.read_text(encoding="utf-8"))["source_dir"])
    except (OSError, ValueError, KeyError) as error:
        text = f"{directory.path} is not an output directory of `rollbook sft`: {error}"
        raise RunDirectoryError(text + files_meant(directory.path)) from error


def dump_sft_toml(loaded: LoadedSftConfig) -> str:
    return tomli_w.dumps(loaded.table)
