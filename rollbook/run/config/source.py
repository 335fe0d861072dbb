"""Where a configuration comes from: a TOML file, a run directory, a dict with objects, or a `RunConfig`; and what a resumed run
may change of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rollbook.contracts.freshness import BatchPolicy
from rollbook.run.config.run import (
    ConfigError,
    ConfigFault,
    Examined,
    LoadedConfig,
    RunConfig,
    examine_table,
    override_table,
    read_table,
)
from rollbook.run.directory import RunDirectory
from rollbook.run.user_objects import UserObjectError, importable_name, reference_to, reference_to_rows

ConfigSource: TypeAlias = str | Path | Mapping[str, Any] | RunConfig
TaskRows: TypeAlias = Sequence[Mapping[str, Any]]
TASK_SOURCES = ("tasks.source", "evaluation.source")
# The ledger's record depends on these settings; a change would invalidate it.
FROZEN = (
    "run.name",
    "run.seed",
    "model",
    "tasks",
    "gate.groups_per_step",
    "gate.max_head_offpolicy_versions",
    "gate.batch_policy",
    "gate.admission_share",
    "rollout.quorum",
)
FROZEN_IN_PARTS = ("rollout.completions_per_prompt",)
"""With batch policy `parts` the gate counts samples, so the size of a group is part of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTable:
    """A configuration that is not yet validated."""

    table: dict[str, Any]
    source_dir: Path
    search_path: tuple[Path, ...] = ()
    file: Path | None = None
    """The file it was read from."""
    run_dir: Path | None = None
    """The run directory that the configuration was read from."""


def read_source(config: ConfigSource) -> SourceTable:
    if isinstance(config, RunConfig):
        # Only what was set: the other fields get their defaults again, such as the run's seed.
        table = config.model_dump(exclude_unset=True)
        return SourceTable(table=table, source_dir=Path.cwd())
    if isinstance(config, Mapping):
        return SourceTable(table=_copied(config), source_dir=Path.cwd())
    path = Path(config)
    if path.is_dir():
        directory = RunDirectory(path.resolve())
        return SourceTable(
            file=directory.config_file,
            table=read_table(directory.require_config(), ())[0],
            source_dir=directory.source_dir,
            search_path=directory.search_path,
            run_dir=directory.path,
        )
    return SourceTable(file=path, table=read_table(path, ())[0], source_dir=path.parent.resolve())


def examine_source(config: Path, overrides: Sequence[str]) -> tuple[SourceTable, Examined]:
    """The configuration of a file or of a run directory, with overrides, and its faults."""
    read = read_source(config)
    faults = [fault for text in overrides if (fault := override_table(read.table, text)) is not None]
    places = [read.source_dir, *read.search_path]
    return read, examine_table(read.table, faults, overrides, file=read.file, source_dir=read.source_dir, places=places)


def load_source(config: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Like `load_config`, for a file or a run directory."""
    read, examined = examine_source(config, overrides)
    return examined.require(read.file)


def check_resume(stored: RunConfig, wanted: RunConfig, *, source: str) -> dict[str, tuple[Any, Any]]:
    """The changed settings, if the run can continue with them; else raises `ConfigError`.

    The trainer itself checks the settings that alter its numbers: it knows whether steps would be replayed.
    """
    changed = changed_fields(stored, wanted)
    if faults := resume_faults(stored, changed):
        raise ConfigError(source, faults)
    return changed


def resume_faults(stored: RunConfig, changed: Mapping[str, tuple[Any, Any]]) -> list[ConfigFault]:
    """The changed settings with which a run cannot continue."""
    fixed = FROZEN + (FROZEN_IN_PARTS if stored.gate.batch_policy is BatchPolicy.PARTS else ())
    return [
        ConfigFault(path, f"is {new!r} here and was {old!r} when this run began; start a new run for that")
        for path, (old, new) in changed.items()
        if any(path == frozen or path.startswith(f"{frozen}.") for frozen in fixed)
    ]


def changed_fields(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Paths whose values differ, with both values."""
    before, after = flat_values(old), flat_values(new)
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Every value by its path, such as `inference.device`."""
    return _flat(config.model_dump(mode="json"))


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{path}.{key}" if path else str(key))
    return flat


def place(table: dict[str, Any], path: str, value: Any) -> None:
    """Set `section.field` of a table. Where a section is not a table, nothing is set: the validation reports it."""
    *sections, field = path.split(".")
    inner: Any = table
    for name in sections:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            return
    inner[field] = str(value.resolve()) if isinstance(value, Path) else value


def with_references(table: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The table with `module:attribute` in place of every function, class and list of tasks. Writes to `directory`."""
    resolved = _copied(table)
    for path in TASK_SOURCES:
        section = resolved.get(path.partition(".")[0])
        if isinstance(section, dict) and not isinstance(section.get("source"), str | None):
            _resolve_tasks(section, path, directory)
    return {name: _resolved(section, name, directory) for name, section in resolved.items()}


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _resolved(value: Any, path: str, directory: Path) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(inner, f"{path}.{key}", directory) for key, inner in value.items()}
    return reference_to(value, setting=path, directory=directory) if callable(value) else value


def _resolve_tasks(section: dict[str, Any], path: str, directory: Path) -> None:
    """A function that other processes cannot import is called here, and its rows are stored: they can be read in a resumed run."""
    source: Callable[..., Iterable[Mapping[str, Any]]] | Iterable[Mapping[str, Any]] = section["source"]
    if callable(source):
        if (name := importable_name(source)) is not None:
            section["source"] = name
            return
        arguments = section.pop("args", None) or {}
        try:
            rows = list(source(**arguments))
        except Exception as error:
            raise UserObjectError(f"{path}: the function raised {type(error).__name__}: {error}") from error
    else:
        try:
            rows = list(source)
        except TypeError as error:
            fault = ConfigFault(
                path, f"is a {type(source).__name__}; pass rows, a function that yields rows, or a name"
            )
            raise ConfigError("the config", [fault]) from error
    section["source"] = reference_to_rows(rows, setting=path, directory=directory)
