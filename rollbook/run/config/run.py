"""The configuration of a run: one TOML file with a section per room, validated as a whole before anything starts.

All faults are reported at once, each with its path in the file. Sections are validated separately, so that a mistake in one does
not hide those in another; then checks across sections follow. Unknown fields are rejected, and so are fields that the chosen
settings would never read.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, Field, ValidationError

from rollbook.contracts.errors import UsageError
from rollbook.envs.config import EnvConfig
from rollbook.inference.config import InferenceConfig
from rollbook.ledger.config import GateConfig, LedgerConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.run.config.checks import CROSS_CHECKS, missing_files, resolved_publish
from rollbook.run.config.evaluation import EvaluationConfig
from rollbook.tasks.config import TasksConfig
from rollbook.telemetry.config import TelemetryConfig
from rollbook.trainer.config import ModelConfig, TrainerConfig


class RunSection(BaseModel, frozen=True, extra="forbid"):
    """Settings of the run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run in the ledger and in messages. Letters, digits, dot, underscore, dash."""

    seed: int = Field(default=0, ge=0)
    """The default of every other seed: initial weights, order of tasks, minibatches."""

    ready_s: float = Field(default=120.0, gt=0)
    """Time limit from the start of a process to its ready message. A slower process stops the run at start-up; later it is
    restarted."""

    silence_s: float = Field(default=60.0, gt=1)
    """A process whose event loop sends no heartbeat for this long hangs: its stack is logged, and it is replaced."""

    most_quick_deaths: int = Field(default=6, ge=0)
    """After this many consecutive deaths, each soon after the start, the run stops with the cause."""


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    run: RunSection = RunSection()
    model: ModelConfig
    tasks: TasksConfig
    env: EnvConfig = EnvConfig()
    inference: InferenceConfig = InferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    gate: GateConfig = GateConfig()
    ledger: LedgerConfig = LedgerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


SEEDED = ("tasks", "inference", "trainer")
"""Sections that have a seed."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(UsageError):
    """The configuration is invalid. `faults` lists everything that was found."""

    def __init__(self, source: str, faults: Sequence[ConfigFault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        count = f"{len(faults)} fault" + ("s" if len(faults) != 1 else "")
        super().__init__("\n".join([f"{source}: {count}", *(f"  {fault}" for fault in faults)]))

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigError, (self.source, self.faults))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: RunConfig
    source_dir: Path
    """Relative paths and users' modules are looked up here."""

    @property
    def search_path(self) -> tuple[str, ...]:
        """Where users' modules are looked up: the directory of the config file, then the working directory."""
        return (str(self.source_dir), str(Path.cwd()))


def load_config(path: Path, overrides: Sequence[str] = (), *, source_dir: Path | None = None) -> LoadedConfig:
    """Read, override, validate. Raises `ConfigError` with every fault."""
    table, faults = read_table(path, overrides)
    home = (source_dir or path.parent).resolve()
    config, more = validate_table(table, home)
    if config is None or faults or more:
        raise ConfigError(str(path), [*faults, *more])
    return LoadedConfig(config, home)


def load_resolved_config(path: Path, *, source_dir: Path) -> LoadedConfig:
    """Read the resolved config of a run directory. It was checked when the run was started, so it is only parsed here."""
    table, _ = read_table(path, ())
    try:
        return LoadedConfig(RunConfig.model_validate(table), source_dir)
    except ValidationError as error:
        faults = [
            ConfigFault(
                ".".join(map(str, e["loc"])),
                f"{plain_message(e['type'], e['msg'])} (was this run made by another version of Rollbook?)",
            )
            for e in error.errors()
        ]
        raise ConfigError(str(path), faults) from error


def read_table(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[ConfigFault]]:
    """A TOML file with overrides, not yet validated, and the faults of the overrides."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), [ConfigFault("file", f"cannot be read: {error.strerror or error}")]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [ConfigFault("file", f"is not TOML: {error}")]) from error
    return table, [fault for text in overrides if (fault := override_table(table, text)) is not None]


def validate_table(table: Mapping[str, Any], source_dir: Path) -> tuple[RunConfig | None, list[ConfigFault]]:
    """Validate every section separately, then check them together."""
    faults: list[ConfigFault] = []
    parts: dict[str, BaseModel] = {}
    table = _with_seeds(table)
    for name in table.keys() - RunConfig.model_fields.keys():
        known = ", ".join(RunConfig.model_fields)
        faults.append(ConfigFault(name, f"unknown section; known are {known}"))
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        if name not in table and field.is_required():
            faults.append(ConfigFault(name, "this section is missing"))
            continue
        try:
            parts[name] = kind.model_validate(table.get(name, {}))
        except ValidationError as error:
            faults += [
                ConfigFault(".".join([name, *map(str, e["loc"])]), plain_message(e["type"], e["msg"]))
                for e in error.errors()
            ]
    faults += [ConfigFault(path, message) for check in CROSS_CHECKS for path, message in check(parts)]
    faults += [ConfigFault(path, message) for path, message in missing_files(parts, source_dir)]
    faults.sort(
        key=lambda fault: (
            list(RunConfig.model_fields).index(s) if (s := fault.path.split(".")[0]) in RunConfig.model_fields else 99
        )
    )
    if faults:
        return None, faults
    if (published := resolved_publish(parts)) is not None:
        parts["inference"] = parts["inference"].model_copy(update={"publish": published})
    # The sections are instances, which pydantic does not validate again.
    return RunConfig.model_validate(parts), []


def _with_seeds(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section without a seed gets the seed of the run."""
    seeded = dict(table)
    run = table.get("run", {})
    seed = run.get("seed", 0) if isinstance(run, Mapping) else 0
    for name in SEEDED:
        if isinstance(section := seeded.get(name, {}), Mapping):
            seeded[name] = {"seed": seed, **section}
    return seeded


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration. Fields that are None are left out: TOML has no null."""
    table = config.model_dump(mode="json", exclude_none=True)
    # With the URL of an external server, settings of the run's own environments are rejected, also with default values.
    if config.env.url is not None:
        table["env"] = config.env.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return tomli_w.dumps(table)


def changed_fields(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Paths whose values differ, with both values."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{path}.{key}" if path else str(key))
    return flat


def plain_message(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown field"
    return message.removeprefix("Value error, ")


def override_table(table: dict[str, Any], text: str) -> ConfigFault | None:
    """Set `a.b=c` in the table; c is parsed as TOML, or taken as text if it is not TOML."""
    path, equals, raw = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return ConfigFault(f"--set {text}", "must look like section.field=value")
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    inner = table
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return ConfigFault(f"--set {text}", f"{key} is not a section")
    inner[keys[-1]] = value
    return None
