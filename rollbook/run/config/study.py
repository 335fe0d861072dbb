"""The file of `rollbook study`: a run config, a grid of settings, and seeds. Each combination is a cell, trained once per seed.

With `replay` the cells are trained on the recorded batches of runs instead: once per run, without generation.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from rollbook.contracts.errors import RunError
from rollbook.run.config.replayed import changed_settings
from rollbook.run.config.run import (
    ConfigError,
    ConfigFault,
    LoadedConfig,
    RunConfig,
    load_config,
    load_resolved_config,
    located,
    other_kind,
    read_table,
)
from rollbook.run.config.suggestions import plain_message
from rollbook.run.directory import RunDirectory

Measure = Literal["held_out_solved", "held_out_reward", "reward"]
AS_RECORDED = "as recorded"
"""Name of the cell of a replay with the settings of the run."""
UNSAFE = re.compile(r"[^A-Za-z0-9_.=+-]+")
"""Characters of a cell's name that its directory does not contain."""


class StudySection(BaseModel, frozen=True, extra="forbid"):
    name: str = Field(default="study", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the study. Its default directory is `runs/NAME`."""

    config: Path | None = None
    """The run config that all cells share, relative to this file."""

    replay: tuple[Path, ...] = ()
    """Run directories, relative to this file, instead of a run config. Each cell trains the recorded batches of each of them again,
    without generation; the grid has settings of `[trainer]` only."""

    sft: Path | None = None
    """A config of `rollbook sft`, relative to this file. It is trained once, and every cell starts from its model."""

    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Each cell is trained once with each of these as `run.seed`."""

    measure: Measure = "held_out_solved"
    """What is compared: the solve rate or the reward of held-out tasks, or the reward of the trained batches. Where
    no evaluation knows which tasks are solved, the reward takes the place of the solve rate."""

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("must be different numbers, 0 or more")
        return seeds

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.config is None) == (not self.replay):
            raise ValueError("set config, to train runs, or replay, to train the batches of recorded runs again")
        if self.replay and (unread := sorted({"sft", "seeds", "measure"} & self.model_fields_set)):
            raise ValueError(f"a replay does not read {', '.join(unread)}: remove it")
        return self


class StudyFile(BaseModel, frozen=True, extra="forbid"):
    study: StudySection
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of every cell that replace those of the run config."""
    grid: dict[str, Any] = Field(default_factory=dict)
    """The axes. `section.field = [values]`, or `any_name = [{name = "…", section.field = value, …}, …]`."""
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    """Combinations to leave out: for some axes, the value or the list of values. Tables of an axis are given by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of settings with one seed: one run."""

    name: str
    seed: int
    labels: Mapping[str, str] = field(hash=False)
    """The label of the cell's value on each axis."""
    overrides: tuple[str, ...]
    replayed: Path | None = None
    """The recorded run whose batches are trained. `seed` is then its place in the file."""

    @property
    def folder(self) -> str:
        return f"{UNSAFE.sub('_', self.name)}/{'seed' if self.replayed is None else 'run'}-{self.seed}"

    @property
    def title(self) -> str:
        return f"{self.name} {f'seed {self.seed}' if self.replayed is None else f'on {self.replayed.name}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    name: str
    file: Path
    config: Path | None
    """None: recorded runs are replayed."""
    sft: Path | None
    measure: Measure
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    """All cells of the first seed, then all of the second: an interrupted study still compares all settings."""


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read the file and check the config of every cell. Raises `ConfigError` with every fault. `overrides` apply to all cells."""
    table, _ = read_table(path, ())
    if (fault := other_kind(table, "study", path)) is not None:
        raise ConfigError(str(path), located([fault], path, ()))
    try:
        file = StudyFile.model_validate(table)
    except ValidationError as error:
        faults = [
            ConfigFault(".".join(map(str, e["loc"])), plain_message(e, e["loc"], StudyFile)) for e in error.errors()
        ]
        raise ConfigError(str(path), located(faults, path, ())) from error
    home = path.parent.resolve()
    faults = [
        ConfigFault(f"study.{name}", f"no such file: {home / source}")
        for name, source in (("config", file.study.config), ("sft", file.study.sft))
        if source is not None and not (home / source).is_file()
    ]
    runs = [(home / run).resolve() for run in file.study.replay]
    faults += [
        ConfigFault("study.replay", f"no run directory: {run}")
        for run in runs
        if not RunDirectory(run).manifest_file.is_file()
    ]
    shared, more = _settings(file.settings, "settings")
    axes, wrong = _axes(file.grid)
    excluded, unknown = _excluded(file.exclude, axes)
    if faults := [*faults, *more, *wrong, *unknown]:
        raise ConfigError(str(path), located(faults, path, ()))
    all_settings = [*shared, *overrides]
    made = _replayed_cells(axes, all_settings, runs) if runs else _seeded_cells(axes, all_settings, file.study.seeds)
    cells = tuple(
        cell
        for cell in made
        if not any(all(cell.labels.get(axis) in labels for axis, labels in one.items()) for one in excluded)
    )
    if not cells:
        raise ConfigError(str(path), [ConfigFault("exclude", "leaves no cell")])
    study = Study(
        name=file.study.name,
        file=path.resolve(),
        config=None if file.study.config is None else home / file.study.config,
        sft=None if file.study.sft is None else home / file.study.sft,
        measure=file.study.measure,
        axes=tuple(axes),
        cells=cells,
    )
    if faults := _replay_faults(study) if runs else _cell_faults(study):
        raise ConfigError(str(path), located(faults, path, ()))
    return study


Axes = dict[str, list[tuple[str, tuple[str, ...]]]]
"""The values of each axis: a label, and the settings as overrides."""


def _axes(grid: Mapping[str, Any]) -> tuple[Axes, list[ConfigFault]]:
    axes: Axes = {}
    faults: list[ConfigFault] = []
    for path, values in _leaves(grid):
        where = f"grid.{path}"
        if not isinstance(values, list) or not values:
            faults.append(ConfigFault(where, "must be a list with at least one value"))
            continue
        found: list[tuple[str, tuple[str, ...]]] = []
        for value in values:
            if isinstance(value, Mapping):
                settings, more = _settings({key: v for key, v in value.items() if key != "name"}, where)
                faults += more
                if not isinstance(name := value.get("name"), str) or not name:
                    faults.append(ConfigFault(where, "each table needs a name, which becomes part of the cell's name"))
                    continue
                found.append((name, settings))
            elif "." not in path:
                faults.append(
                    ConfigFault(where, "is not section.field: its values must be tables of settings with a name")
                )
                break
            else:
                settings, more = _settings({path: value}, "grid")
                faults += more
                found.append((_label(path, value), settings))
        folders = [UNSAFE.sub("_", label) for label, _ in found]
        if repeated := sorted({folder for folder in folders if folders.count(folder) > 1}):
            faults.append(ConfigFault(where, f"has several values named {', '.join(repeated)}"))
        axes[path] = found
    return axes, faults


def _excluded(tables: Sequence[Mapping[str, Any]], axes: Axes) -> tuple[list[dict[str, list[str]]], list[ConfigFault]]:
    """For each table the labels of some axes."""
    found: list[dict[str, list[str]]] = []
    faults: list[ConfigFault] = []
    for number, table in enumerate(tables):
        labels: dict[str, list[str]] = {}
        for axis, value in _leaves(table):
            values = value if isinstance(value, list) else [value]
            known = {label for label, _ in axes.get(axis, [])}
            named = [one if one in known else _label(axis, one) for one in values]
            if axis not in axes:
                faults.append(
                    ConfigFault(f"exclude.{number}.{axis}", f"is no axis of the grid; axes are {', '.join(axes)}")
                )
            elif wrong := [str(one) for one, label in zip(values, named, strict=True) if label not in known]:
                faults.append(ConfigFault(f"exclude.{number}.{axis}", f"has no value {', '.join(wrong)}"))
            labels[axis] = named
        found.append(labels)
    return found, faults


def _label(path: str, value: Any) -> str:
    return f"{path.rpartition('.')[2]}={value if isinstance(value, str) else toml_value(value)}"


def _settings(table: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], list[ConfigFault]]:
    """The settings of nested tables as overrides `section.field=value`."""
    overrides: list[str] = []
    faults: list[ConfigFault] = []
    for path, value in _leaves(table):
        if path.startswith("run.seed"):
            faults.append(ConfigFault(f"{where}.{path}", "set study.seeds instead"))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            faults.append(ConfigFault(f"{where}.{path}", "a list of tables cannot be set in a study"))
        else:
            overrides.append(f"{path}={toml_value(value)}")
    return tuple(overrides), faults


def toml_value(value: Any) -> str:
    """A value as TOML, on one line. Texts are written without line ends, so only those between the items of a list are removed."""
    return tomli_w.dumps({"value": value}).partition("=")[2].replace("\n", " ").strip()


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.field` with its value, whether the file has nested tables, dotted or quoted keys."""
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _cells(axes: Axes, shared: Sequence[str], seed: int) -> Iterator[Cell]:
    for combination in itertools.product(*axes.values()):
        labels = [label for label, _ in combination]
        yield Cell(
            name=",".join(labels) or "base",
            seed=seed,
            labels=dict(zip(axes, labels, strict=True)),
            overrides=(*shared, *(text for _, settings in combination for text in settings)),
        )


def _seeded_cells(axes: Axes, shared: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    for seed in seeds:
        for cell in _cells(axes, shared, seed):
            yield replace(cell, overrides=(*cell.overrides, f"run.seed={seed}"))


def _replayed_cells(axes: Axes, shared: Sequence[str], runs: Sequence[Path]) -> Iterator[Cell]:
    """The recorded settings first, then every combination; all cells of the first run, then all of the second."""
    for number, run in enumerate(runs):
        yield Cell(name=AS_RECORDED, seed=number, labels={}, overrides=(), replayed=run)
        if axes or shared:
            yield from (replace(cell, replayed=run) for cell in _cells(axes, shared, number))


def _replay_faults(study: Study) -> list[ConfigFault]:
    """Faults of the settings of each cell with each run, each once."""
    found: dict[str, ConfigFault] = {}
    for run in dict.fromkeys(cell.replayed for cell in study.cells if cell.replayed is not None):
        recorded = load_resolved_config(RunDirectory(run)).config.trainer
        for cell in study.cells:
            if cell.replayed == run:
                try:
                    changed_settings(recorded, None, cell.overrides)
                except RunError as error:
                    found.setdefault(str(error), ConfigFault(f"cell {cell.title}", str(error)))
    return list(found.values())


def _cell_faults(study: Study) -> list[ConfigFault]:
    """Faults of the cells' configs, each once, with the cells that have it. Held-out tasks must be the same in all cells."""
    assert study.config is not None
    found: dict[str, list[str]] = {}
    loaded: dict[str, LoadedConfig] = {}
    for cell in study.cells:
        if cell.name in loaded or any(cell.name in names for names in found.values()):
            continue  # another seed of the same settings
        try:
            loaded[cell.name] = load_config(study.config, cell.overrides)
        except ConfigError as error:
            for fault in error.faults:
                found.setdefault(str(fault), []).append(cell.name)
    total = len({cell.name for cell in study.cells})
    faults = [
        ConfigFault("every cell" if len(names) == total else f"cell {'; '.join(names)}", text)
        for text, names in found.items()
    ]
    held_out: dict[str, list[str]] = {}
    for name, one in loaded.items():
        held_out.setdefault(_held_out_tasks(one.config), []).append(name)
    if len(held_out) > 1:
        first, other, *_ = held_out.values()
        faults.append(
            ConfigFault(
                "evaluation", f"cells {first[0]} and {other[0]} have different held-out tasks: use the same in all"
            )
        )
    if study.measure != "reward" and any(one.config.evaluation.every_steps is None for one in loaded.values()):
        faults.append(
            ConfigFault(
                "study.measure",
                f'{study.measure!r} needs evaluation.every_steps in {study.config.name}; or set study.measure = "reward"',
            )
        )
    return faults


def _held_out_tasks(config: RunConfig) -> str:
    played = config.evaluation
    tasks = played.tasks_config(config.tasks).model_dump_json()
    return f"{tasks} {played.max_tasks} {played.episodes} {played.greedy}"
