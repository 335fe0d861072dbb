"""The configuration of a run: one TOML file with a section per room, validated as a whole before anything starts.

All faults are reported at once, each with its path in the file. Sections are validated separately, and again without the settings
that were wrong, so that a mistake does not hide others; checks across sections follow. Unknown fields are rejected, and so are
fields that the chosen settings would never read.
"""

import copy
import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from rollbook.contracts.admission import RunSettings
from rollbook.contracts.errors import UsageError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.user_errors import indented
from rollbook.envs.config import EnvConfig
from rollbook.inference.config import InferenceConfig
from rollbook.ledger.config import GateConfig, RunLedgerConfig
from rollbook.rollout.agents.coding_agents import CODING_AGENTS
from rollbook.rollout.config import RolloutConfig
from rollbook.run.config.checks import CROSS_CHECKS
from rollbook.run.config.cluster import ClusterConfig, ResourcesConfig
from rollbook.run.config.evaluation import EvaluationConfig
from rollbook.run.config.repair import Repairs
from rollbook.run.config.resolved_settings import (
    resolved_exactness,
    resolved_max_queued,
    resolved_publish,
    resolved_record_routes,
    resolved_reward_weights,
    resolved_score_credit,
    resolved_turn_credit,
)
from rollbook.run.config.suggestions import plain_message
from rollbook.run.config.toml_lines import broken_line, key_lines, line_of
from rollbook.run.config.user_files import missing_files
from rollbook.run.config.verifiers import missing_interpreter, with_verifiers
from rollbook.run.directory import RunDirectory, files_meant
from rollbook.sandbox.config import SandboxConfig
from rollbook.tasks.config import ATROPOS, TasksConfig
from rollbook.telemetry.config import TelemetryConfig
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loss_settings import OF_WHOLE_GROUPS
from rollbook.trainer.model_config import ModelConfig


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

    process_template: bool = True
    """Start processes by forking one that has imported torch already: they start and restart within a second. Linux only."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory that all processes of the run together may use of each GPU, in GB (10^9 bytes). Unset: all that is free when the
    run starts."""


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    run: RunSection = RunSection()
    model: ModelConfig
    tasks: TasksConfig
    env: EnvConfig = EnvConfig()
    sandbox: SandboxConfig = SandboxConfig()
    inference: InferenceConfig = InferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    gate: GateConfig = GateConfig()
    ledger: RunLedgerConfig = RunLedgerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    resources: ResourcesConfig = ResourcesConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def coding_agent(self) -> str | None:
        """The name of the coding agent that plays the episodes; None: something else does."""
        agent = self.rollout.settings.get("agent") if self.rollout.function == "agent" else None
        return agent if isinstance(agent, str) and agent in CODING_AGENTS else None

    @property
    def unconfined(self) -> tuple[str, ...]:
        """The settings with which code of the policy runs without a sandbox."""
        tables = {"env.args.sandbox": self.env.args, "rollout.settings.sandbox": self.rollout.settings}
        return tuple(f'{name} = "none"' for name, table in tables.items() if table.get("sandbox") == "none")

    def ledger_settings(self, *, limits: TrainingLimits | None = None, directory_id: str = "") -> RunSettings:
        is_in_parts = self.gate.batch_policy is BatchPolicy.PARTS
        return self.gate.settings(
            max_steps=self.trainer.max_steps,
            keep_payloads=self.ledger.keep_payloads,
            limits=limits,
            directory_id=directory_id,
            samples_per_group=self.rollout.completions_per_prompt if is_in_parts else 1,
            quorum=self.rollout.quorum_size if is_in_parts else None,
        )


AUTO_SETTINGS = (
    "trainer.device",
    "trainer.compute_dtype",
    "trainer.threads",
    "trainer.max_tokens_per_microbatch",
    "trainer.max_logits_mb",
    "trainer.gradient_checkpointing",
    "trainer.pass_cost_tokens",
    "trainer.checkpoint_copy",
    "trainer.gpu_memory_gb",
    "trainer.max_sequence_tokens",
    "inference.device",
    "inference.dtype",
    "inference.threads",
    "inference.capture_steps",
    "inference.max_running",
    "inference.max_model_len",
    "inference.kv_memory_mb",
    "inference.transfer",
    "inference.gpu_memory_gb",
    "rollout.workers",
    "trainer.ranks",
    "inference.replicas",
    "resources.trainer_gpus",
    "resources.policy_gpus",
    "resources.shared_base",
    "resources.mps",
    "sandbox.at_once",
    "gate.max_groups_in_flight",
)
"""Settings that are chosen at the start of a run from its machine and its model, if the run file leaves them out or sets "auto".
The defaults of their config classes are those without a GPU."""

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}

COMMAND_OF = {"study": "rollbook study", "sft": "rollbook sft", "tasks": "rollbook train"}
"""The command of a file by a section that no other kind of file has."""

SEEDED = ("tasks", "inference", "trainer")
"""Sections that have a seed."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    path: str
    message: str
    place: str = ""
    """`run.toml:12`, or `--set` for an override. Empty if the file does not contain the setting."""

    def __str__(self) -> str:
        return f"{self.place}: {self.path}: {self.message}" if self.place else f"{self.path}: {self.message}"


class ConfigError(UsageError):
    """The configuration is invalid. `faults` lists everything that was found."""

    def __init__(self, source: str, faults: Sequence[ConfigFault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        count = f"{len(faults)} fault" + ("s" if len(faults) != 1 else "")
        super().__init__("\n".join([f"{source}: {count}", *(indented(str(fault), "  ") for fault in faults)]))

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigError, (self.source, self.faults))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: RunConfig
    source_dir: Path
    """Relative paths are looked up here."""
    search_path: tuple[Path, ...]
    """Users' modules are looked up here; `source_dir` is first."""
    file: Path | None = None
    """The file it was read from, for the lines of faults. None: it was passed as an object."""

    def moved(self, old: str | Path, new: Path) -> "LoadedConfig":
        """With `new` in place of the directory `old` of the search path."""
        places = [new if path == Path(old) else path for path in self.search_path]
        return dataclasses.replace(self, search_path=tuple(places))


@dataclass(frozen=True, slots=True)
class Examined:
    """A configuration and its faults."""

    loaded: LoadedConfig | None
    """With the faulty settings corrected or left out, for further checks. None if that is not possible."""
    faults: list[ConfigFault]
    repairs: Repairs

    def require(self, file: Path | None) -> LoadedConfig:
        if self.loaded is None or self.faults:
            raise ConfigError(name_of(file), self.faults)
        return self.loaded


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    source_dir: Path | None = None,
    search_path: Sequence[Path] = (),
    modules: Sequence[Path] = (),
) -> LoadedConfig:
    """Read, override, validate. Raises `ConfigError` with every fault. `search_path`: more directories of users' modules.

    `modules`: copies of users' modules, searched before the directory of the file.
    """
    home = (source_dir or path.parent).resolve()
    table, faults = read_table(path, overrides)
    places = [*modules, home, *search_path]
    return examine_table(table, faults, overrides, file=path, source_dir=home, places=places).require(path)


def checked_config(
    table: Mapping[str, Any],
    faults: Sequence[ConfigFault],
    overrides: Sequence[str],
    *,
    file: Path | None,
    source_dir: Path,
    search_path: Sequence[Path],
) -> LoadedConfig:
    """Validate a table to which the overrides were applied. Raises `ConfigError` with the given faults and all others."""
    places = [source_dir, *search_path]
    return examine_table(table, faults, overrides, file=file, source_dir=source_dir, places=places).require(file)


def examine_table(
    table: Mapping[str, Any],
    faults: Sequence[ConfigFault],
    overrides: Sequence[str],
    *,
    file: Path | None,
    source_dir: Path,
    places: Sequence[Path],
) -> Examined:
    places = tuple(dict.fromkeys(places))
    repairs = Repairs(table, RunConfig)
    if (fault := other_kind(table, "tasks", file)) is not None:
        return Examined(None, located([fault], file, overrides), repairs)
    config, more = validate_table(repairs, source_dir, places)
    loaded = None if config is None else LoadedConfig(config, source_dir, places, file)
    return Examined(loaded, in_order([*faults, *located(more, file, overrides)]), repairs)


def other_kind(table: Mapping[str, Any], section: str, file: Path | None) -> ConfigFault | None:
    """The fault that a file without its required section is one for another command."""
    found = next((one for one in COMMAND_OF if one in table and section not in table), None)
    if found is None:
        return None
    command = COMMAND_OF[found]
    return ConfigFault(found, f"this is a file for `{command}`: start it with `{command} {file or 'FILE'}`")


def name_of(file: Path | None) -> str:
    """Where a configuration comes from, for messages."""
    return "the config" if file is None else str(file)


def located(faults: Sequence[ConfigFault], file: Path | None, overrides: Sequence[str]) -> list[ConfigFault]:
    """The faults with the lines of the file that they refer to."""
    lines = {} if file is None else key_lines(file.read_text(encoding="utf-8"))
    changed = [text.partition("=")[0].strip() for text in overrides]

    def place(setting: str) -> str:
        if any(setting == one or setting.startswith(f"{one}.") for one in changed):
            return "--set"
        line = line_of(setting, lines)
        if line is None and any(one.startswith(f"{setting}.") for one in changed):
            return "--set"
        return "" if line is None else f"{file}:{line}"

    return [dataclasses.replace(fault, place=place(fault.path)) for fault in faults]


def in_order(faults: Sequence[ConfigFault]) -> list[ConfigFault]:
    """By line of the file; those without a line come last."""

    def line(fault: ConfigFault) -> float:
        number = fault.place.rpartition(":")[2]
        return int(number) if number.isdecimal() else math.inf

    return sorted(faults, key=line)


def load_resolved_config(directory: RunDirectory) -> LoadedConfig:
    """Read the resolved config of a run directory. It was checked when the run was started, so it is only parsed here."""
    path = directory.require_config()
    table, _ = read_table(path, ())
    if "sft" in table:
        raise directory.no_run("it has no tasks")
    try:
        return LoadedConfig(RunConfig.model_validate(table), directory.source_dir, directory.search_path)
    except ValidationError as error:
        faults = [
            ConfigFault(
                ".".join(map(str, e["loc"])),
                f"{plain_message(e, e['loc'], RunConfig)} (was this run made by another version of Rollbook?)",
            )
            for e in error.errors()
        ]
        raise ConfigError(str(path), faults) from error


def read_table(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[ConfigFault]]:
    """A TOML file with overrides, not yet validated, and the faults of the overrides."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"{path.absolute()} cannot be read: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            text += "; `rollbook init NAME` writes one"
        elif path.is_dir():
            text = f"{path.absolute()} is a directory{files_meant(path)}"
        raise ConfigError(str(path), [ConfigFault("file", text)]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line, advice = (None, "") if isinstance(error, UnicodeDecodeError) else broken_line(path, error)
        syntax = ConfigFault("file", f"is not TOML: {error}{advice}", "" if line is None else f"{path}:{line}")
        raise ConfigError(str(path), [syntax]) from error
    return table, [fault for text in overrides if (fault := override_table(table, text)) is not None]


def validate_table(
    repairs: Repairs, source_dir: Path, search_path: Sequence[Path]
) -> tuple[RunConfig | None, list[ConfigFault]]:
    """Validate every section separately, then check them together; repeat without the settings that were wrong."""
    faults = [ConfigFault(path, message) for path, message in repairs.unknown_sections()]
    while True:
        parts, errors = _sections(
            _with_environment(with_verifiers(_with_batch_policy(_with_seeds(without_auto(repairs.table))), source_dir))
        )
        more = [fault for check in CROSS_CHECKS for fault in check(parts)]
        absent = [*missing_files(parts, source_dir, search_path), *missing_interpreter(parts)]
        repairs.absent |= {path for path, _ in absent}
        more += absent
        more += [
            (name, "this section is missing")
            for name in RunConfig.model_fields
            if not (name in parts or name in errors)
        ]
        known = {(fault.path, fault.message) for fault in faults}
        faults += [
            ConfigFault(repairs.written(path), message)
            for path, message in more
            if (repairs.written(path), message) not in known and not repairs.is_consequence(path, message)
        ]
        if not errors:
            break
        before = copy.deepcopy(repairs.table)
        faults += [ConfigFault(path, message) for path, message in repairs.sections(errors)]
        if repairs.table == before:
            break
    order = list(RunConfig.model_fields)
    faults.sort(key=lambda fault: order.index(name) if (name := fault.path.partition(".")[0]) in order else len(order))
    if len(parts) < len(order):
        return None, faults
    resolved: dict[str, dict[str, Any]] = {
        "inference": {
            "publish": resolved_publish(parts),
            "max_queued": resolved_max_queued(parts),
            "record_routes": resolved_record_routes(parts),
            "exactness": (exactness := resolved_exactness(parts)),
        },
        "rollout": {"turn_credit": resolved_turn_credit(parts), "score_credit": resolved_score_credit(parts)},
        "trainer": {"reward_weights": resolved_reward_weights(parts), "exactness": exactness},
    }
    for section, values in resolved.items():
        settled = {name: value for name, value in values.items() if value is not None}
        parts[section] = parts[section].model_copy(update=settled)
    # The sections are instances, which pydantic does not validate again.
    return RunConfig.model_validate(parts), faults


def _sections(table: Mapping[str, Any]) -> tuple[dict[str, BaseModel], dict[str, list[ErrorDetails]]]:
    """The valid sections, and the errors of the others. A required section that is absent is in neither."""
    parts: dict[str, BaseModel] = {}
    errors: dict[str, list[ErrorDetails]] = {}
    for name, kind in SECTIONS.items():
        if name not in table and RunConfig.model_fields[name].is_required():
            continue
        try:
            parts[name] = kind.model_validate(table.get(name, {}))
        except ValidationError as error:
            errors[name] = error.errors()
    return parts, errors


def without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    """A setting that is "auto" is left out: it is chosen at the start of the run."""
    left: dict[str, Any] = dict(table)
    for path in AUTO_SETTINGS:
        section, _, name = path.partition(".")
        if isinstance(values := left.get(section), Mapping) and values.get(name) == "auto":
            left[section] = {key: value for key, value in values.items() if key != name}
    return left


def _with_seeds(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section without a seed gets the seed of the run."""
    seeded = dict(table)
    run = table.get("run", {})
    seed = run.get("seed", 0) if isinstance(run, Mapping) else 0
    for name in SEEDED:
        if isinstance(section := seeded.get(name, {}), Mapping):
            seeded[name] = {"seed": seed, **section}
    return seeded


def _with_batch_policy(table: dict[str, Any]) -> dict[str, Any]:
    """Where groups arrive whole, `wait` is the default; where whole groups are compared, `trim`."""
    tasks, rollout, gate, trainer = (table.get(name, {}) for name in ("tasks", "rollout", "gate", "trainer"))
    if not all(isinstance(section, Mapping) for section in (tasks, rollout, gate, trainer)):
        return table
    if tasks.get("source") == ATROPOS or rollout.get("oversample"):
        return {**table, "gate": {"batch_policy": str(BatchPolicy.WAIT), **gate}}
    if trainer.get("advantage") in OF_WHOLE_GROUPS or _needs_whole_groups(rollout):
        return {**table, "gate": {"batch_policy": str(BatchPolicy.TRIM), **gate}}
    return table


def _needs_whole_groups(rollout: Mapping[str, Any]) -> bool:
    rewards = rollout.get("rewards", {})
    functions = rewards.get("functions", {}) if isinstance(rewards, Mapping) else {}
    tables = functions.values() if isinstance(functions, Mapping) else ()
    return any(isinstance(table, Mapping) and table.get("whole_group") is True for table in tables)


def _with_environment(table: dict[str, Any]) -> dict[str, Any]:
    """A model, tasks and reward functions are enough: then each task is one question."""
    rollout, env = (table.get(name, {}) for name in ("rollout", "env"))
    if not isinstance(rollout, Mapping) or not isinstance(env, Mapping):
        return table
    rewards = rollout.get("rewards", {})
    has_rewards = isinstance(rewards, Mapping) and rewards.get("functions")
    if not has_rewards or "function" in rollout or "name" in env or "url" in env:
        return table
    return {**table, "env": {"name": "question", **env}}


def dump_toml(config: RunConfig, *, masks_secrets: bool = False, is_full: bool = True) -> str:
    """The resolved configuration. Fields that are None are left out: TOML has no null. Not `is_full`: without default values.

    The processes of the run read it, so it contains secrets; the run directory is private. For display they are masked.
    """
    table = config.model_dump(mode="json", exclude_none=True, exclude_defaults=not is_full)
    # With the URL of an external server, settings of the run's own environments are rejected, even with default values.
    if config.env.url is not None:
        table["env"] = config.env.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if config.env.token is not None and not masks_secrets:
        table["env"]["token"] = config.env.token.get_secret_value()
    if config.ledger.store is not None and not masks_secrets:
        table["ledger"]["store"] = config.ledger.store.get_secret_value()
    return tomli_w.dumps(table)


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
