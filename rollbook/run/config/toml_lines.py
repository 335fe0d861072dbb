"""Finds the line of each key in a TOML file, for error messages. Only for files that `tomllib` accepts."""

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEYS = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_KEYS})[ \t]*\]")
_ASSIGNMENT = re.compile(rf"[ \t]*({_KEYS})[ \t]*=(.*)", re.DOTALL)
_INLINE = re.compile(rf"[{{,][ \t]*({_KEYS})[ \t]*=")


def key_lines(text: str) -> dict[str, int]:
    """The line, counted from 1, of each table and key by its dotted path."""
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, statement in _statements(text):
        if header := _HEADER.match(statement):
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
            _add(lines, table, number)
        elif assignment := _ASSIGNMENT.match(statement):
            path = (*table, *_parts(assignment[1]))
            _add(lines, path, number)
            if assignment[2].lstrip().startswith("{"):
                for inline in _INLINE.finditer(assignment[2]):
                    with suppress(tomllib.TOMLDecodeError):  # a text that looks like a key
                        _add(lines, (*path, *_parts(inline[1])), number)
    return lines


def broken_line(file: Path, error: tomllib.TOMLDecodeError) -> tuple[int | None, str]:
    """The number of the line that is no TOML, and its text for the end of the message. None: the file ends too early."""
    found = re.search(r"at line (\d+)", str(error))
    if found is None:
        return None, ""
    text = file.read_text(encoding="utf-8").split("\n")[int(found[1]) - 1].strip()
    has_value = "Invalid value" in str(error) and not text.endswith("=")
    return int(found[1]), f": {text}" + ("; a string needs quotes" if has_value else "")


def line_of(path: str, lines: dict[str, int]) -> int | None:
    """The line of a setting, or of the innermost table around it that the file contains."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def _add(lines: dict[str, int], path: tuple[str, ...], number: int) -> None:
    for length in range(1, len(path) + 1):
        lines.setdefault(".".join(path[:length]), number)


def _parts(keys: str) -> tuple[str, ...]:
    parts: list[str] = []
    inner: Any = tomllib.loads(f"{keys} = 0")
    while isinstance(inner, dict):
        ((key, inner),) = inner.items()
        parts.append(key)
    return tuple(parts)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Headers and assignments with the line of their start. A value may continue over several lines."""
    pending, start = "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
        pending += line + "\n"
        try:
            tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        yield start, pending
        pending = ""
