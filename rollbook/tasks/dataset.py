"""Loads tasks from a file, a dataset or a Python function, with ids that survive edits of the source, and builds the `TaskSource`.

Loaded rows are plain JSON values, because they are sent to other processes and their digests must be the same everywhere.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.decoding import TOO_DEEP, is_too_deep
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path, load_on_demand, load_plugin
from rollbook.contracts.ports import TaskSource
from rollbook.contracts.task import Task, TaskId
from rollbook.contracts.user_errors import describe_error, did_you_mean
from rollbook.sandbox.harbor.task import find_tasks, read_task
from rollbook.tasks.config import HARBOR_PREFIX, HUB_PREFIX, TasksConfig, is_harbor, is_hub
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.cursor import CursorDataLoader
from rollbook.tasks.mastery_log import MasteryLog

MAX_TASKS = 10_000_000
"""A source with more rows is assumed to be an endless generator. All tasks are kept in memory."""


class DatasetError(RunError):
    """The source of tasks is faulty."""


def load_tasks(
    config: TasksConfig, *, base_dir: Path, held_out: str | None = None, setting: str = "tasks.split"
) -> tuple[Task, ...]:
    """All tasks, in the order of the source. `base_dir` is the directory of the config file.

    `held_out`: rows of this split are left out. `setting`: the name of the split's setting, for errors.
    """
    if config.is_function:
        rows = _rows_of_function(config.source, config.args, base_dir)
    elif is_hub(config.source):
        rows = _rows_of_hub(config, base_dir, setting)
    elif is_harbor(config.source):
        rows = _rows_of_harbor(base_dir / config.source.removeprefix(HARBOR_PREFIX))
    else:
        rows = _rows_of_file(base_dir / config.source)
    chosen = ((where, _with_columns(row, config.columns, where)) for where, row in islice(rows, config.limit))
    tasks = tuple(_with_ids(chosen, id_field=config.id_field))
    if not tasks:
        raise DatasetError(f"{config.source} has no tasks; at least one row is needed")
    # The split is applied after ids are assigned, so that ids do not depend on it.
    if config.split is not None and not is_hub(config.source):
        return _of_split(tasks, config.split, config, setting)
    if held_out is None:
        return tasks
    trained = tuple(task for task in tasks if task.row.get(config.split_field) != held_out)
    if not trained:
        raise DatasetError(
            f"{config.source}: all {len(tasks)} tasks are in split {held_out!r}, which is held out (evaluation.split), so "
            "none is left to train"
        )
    return trained


def build_source(config: TasksConfig, tasks: Sequence[Task], *, mastery_file: Path | None = None) -> TaskSource:
    """`mastery_file`: where a curriculum logs mastery over time."""
    if config.order == "curriculum":
        log = None if mastery_file is None else MasteryLog(mastery_file)
        return Curriculum(tasks, config.curriculum, seed=config.seed, log=log)
    return CursorDataLoader(tasks, epochs=config.epochs, shuffle=config.shuffle, seed=config.seed)


def _of_split(tasks: tuple[Task, ...], split: str, config: TasksConfig, setting: str) -> tuple[Task, ...]:
    field = config.split_field
    without = next((task.id for task in tasks if not isinstance(task.row.get(field), str)), None)
    if without is not None:
        raise DatasetError(
            f"{config.source}: task {without!r} has no text in field {field!r}; "
            f"name a split in each row, or remove {setting}"
        )
    chosen = tuple(task for task in tasks if task.row[field] == split)
    if not chosen:
        known = sorted({str(task.row[field]) for task in tasks})
        raise DatasetError(
            f"{config.source}: no task is in split {split!r}; the splits are: {', '.join(known)}{did_you_mean(split, known)}"
        )
    return chosen


def same_content(config: TasksConfig, task: Task) -> str:
    """Equal for tasks that differ in their id and split only."""
    return content_digest({k: v for k, v in task.row.items() if k not in (config.id_field, config.split_field)})


def content_digest(row: Mapping[str, Any]) -> str:
    """The id of a row without one: a digest of its canonical JSON."""
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _with_ids(rows: Iterable[tuple[str, dict[str, Any]]], *, id_field: str) -> Iterator[Task]:
    """Assign ids. A repeated id gets a suffix that depends only on the order of the source."""
    seen: dict[str, int] = {}
    for where, row in islice(rows, MAX_TASKS + 1):
        if len(seen) >= MAX_TASKS:
            raise DatasetError(f"{where}: more than {MAX_TASKS} tasks; a function must end (`epochs` repeats it)")
        _require_encodable(row, where)
        base = _id_of(row, id_field, where)
        unique = base
        while unique in seen:
            seen[base] += 1
            unique = f"{base}#{seen[base]}"
        seen[unique] = 1
        yield Task(id=TaskId(unique), row=row)


def _require_encodable(row: Mapping[str, Any], where: str) -> None:
    """A row is sent to workers as MessagePack. JSON allows larger numbers and lone surrogates."""
    try:
        msgspec.msgpack.encode(row)
    except (OverflowError, UnicodeEncodeError) as error:
        raise DatasetError(
            f"{where}: {error}. Whole numbers must fit in 64 bits (write larger ones as text), and text must be valid Unicode"
        ) from error


def _id_of(row: Mapping[str, Any], id_field: str, where: str) -> str:
    value = row.get(id_field)
    if value is None:
        return content_digest(row)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value):
        raise DatasetError(
            f"{where}: field {id_field!r} is {value!r}; an id must be a non-empty text or a whole number"
        )
    if "@" in str(value):
        raise DatasetError(
            f"{where}: id {value!r} contains '@', which separates task and draw; rename it or choose another id_field"
        )
    return str(value)


def _with_columns(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    if not columns:
        return row
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise DatasetError(
            f"{where}: there is no column {missing[0]!r} (tasks.columns); the columns are: {', '.join(row)}"
            f"{did_you_mean(missing[0], list(row))}"
        )
    return {field: row[column] for field, column in columns.items()}


def _rows_of_hub(config: TasksConfig, base_dir: Path, setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name = config.source.removeprefix(HUB_PREFIX)
    hub = load_on_demand("rollbook.tasks.hub")
    split = config.split or hub.DEFAULT_SPLIT
    try:
        for number, row in enumerate(
            hub.rows(name, split=config.split, hub=config.hub, base_dir=base_dir, setting=setting)
        ):
            where = f"{config.source}, split {split}, row {number}"
            yield where, _plain(row, where)
    except DatasetError:
        raise
    except Exception as error:  # The library raises errors of the network, of files and of formats.
        raise DatasetError(f"{config.source} (split {split}) cannot be read: {describe_error(error)}") from error


def _rows_of_harbor(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each task is read and checked, so that one that cannot be played is reported before a run starts."""
    directories = find_tasks(root.resolve())
    faults: list[RunError] = []
    for directory in directories:
        try:
            task = read_task(directory)
        except RunError as error:
            faults.append(error)
            continue
        texts = {name: value for name, value in task.metadata.items() if isinstance(value, str)}
        row = {
            "id": task.name,
            "instruction": task.instruction,
            "path": str(directory),
            "timeout_s": task.agent_timeout_s,
        }
        yield str(directory), {**texts, **row}
    if len(faults) == 1:
        raise faults[0]
    if faults:
        count = f"{len(faults)} of {len(directories)} tasks are faulty, and `rollbook tasks check {root}` names them"
        raise DatasetError(f"{count}. The first: {faults[0]}")


def _rows_of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    match path.suffix:
        case ".csv":
            return _rows_of_csv(path)
        case ".parquet":
            return _rows_of_parquet(path)
    return _rows_of_jsonl(path)


def _rows_of_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first line names the columns. All values are strings."""
    reader = csv.DictReader(io.StringIO(_text_of(path), newline=""), strict=True)
    try:
        for number, row in enumerate(reader, start=1):
            where = f"{path}, row {number}"
            if None in row or None in row.values():
                raise DatasetError(f"{where}: it does not have one value for each of the columns of the first line")
            yield where, dict(row)
    except csv.Error as error:
        raise DatasetError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def _rows_of_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    parquet = load_on_demand("rollbook.tasks.parquet")
    try:
        for number, row in enumerate(parquet.rows(path)):
            where = f"{path}, row {number}"
            yield where, _plain(row, where)
    except DatasetError:
        raise
    except (OSError, ValueError) as error:
        raise DatasetError(f"tasks: cannot read {path}: {error}") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DatasetError(
            f"{path}, line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file, for example with iconv"
        ) from error
    except OSError as error:
        raise DatasetError(
            f"tasks: cannot read {path}: {error}. A relative path is relative to the directory of the config file"
        ) from error


def _rows_of_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text_of(path)
    # Split at newlines only: JSON strings may contain other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if is_too_deep(line):
            raise DatasetError(f"{where}: {TOO_DEEP}")
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{where}: not JSON ({error}); each line must be one object") from error
        if not isinstance(row, dict):
            raise DatasetError(f"{where}: a {type(row).__name__}; each line must be one JSON object, like {{...}}")
        yield where, row


def _rows_of_function(source: str, args: Mapping[str, Any], base_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    extend_search_path([base_dir.resolve()])
    function = load_plugin(source, setting="tasks.source")
    try:
        for number, row in enumerate(function(**args)):
            yield f"{source}, row {number}", _plain(row, f"{source}, row {number}")
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"tasks: {source} raised {describe_error(error)}") from error


def _plain(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: a {type(row).__name__}; each row must be a mapping")
    try:
        text = json.dumps(dict(row), allow_nan=False)
        if is_too_deep(text):
            raise ValueError(TOO_DEEP)
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DatasetError(
            f"{where}: not plain JSON ({error}); use strings, numbers, lists and mappings only"
        ) from error
    assert isinstance(plain, dict)
    return plain
