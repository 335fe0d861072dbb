"""Shell tasks for a coding agent: generated rows, and the reward of the files that it leaves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.envs.builtin.shell import file_tasks

HELD_OUT_SEED = 1_000_003


def rows(split: str, count: int, *, held_out: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`train`: `count` different tasks, none of them held out. `test`: the held-out ones, of another seed."""
    reserved = {_key(task): task for task in file_tasks(count=held_out, seed=HELD_OUT_SEED)}
    different = {_key(task): task for task in file_tasks(count=3 * count, seed=seed)}
    trained = [task for key, task in different.items() if key not in reserved]
    for task in reserved.values() if split == "test" else trained[:count]:
        kind = task["id"].split("-")[1]
        yield {**task, "id": f"{split}-{task['id']}", "instruction": task["goal"], "kind": kind}


def _key(task: dict[str, Any]) -> str:
    return repr((task["goal"], sorted(task["files"].items())))


def solved(row: dict[str, Any], _result: Any, _messages: list[Any]) -> bool:
    """Whether every expected file has its text and the others are gone. The agent has ended, and its files were copied out."""
    return all(_text(Path(row["workspace"], path)) == text for path, text in row["expect"].items())


def _text(path: Path) -> str | None:
    if path.is_dir():
        return ""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
