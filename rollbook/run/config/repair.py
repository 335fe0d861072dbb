"""Corrects or leaves out faulty settings of a table, so that the rest can be checked too and all faults are reported at once.

A fault that follows from a correction is not reported: it names a setting that was left out.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rollbook.contracts.user_errors import did_you_mean
from rollbook.run.config.suggestions import plain_message, suggestion


class Repairs:
    def __init__(self, table: Mapping[str, Any], root: type[BaseModel]) -> None:
        self.table: dict[str, Any] = copy.deepcopy(dict(table))
        self.left_out: set[str] = set()
        """Settings and tables with wrong values. Unknown settings are not among them: the run would not read them."""
        self.absent: set[str] = set()
        """Settings with a file, a module or an interpreter that does not exist. They stay in the table."""
        self._renamed: dict[str, str] = {}
        """Settings that were added under their right name, and the names in the table."""
        self._created: set[str] = set()
        """Tables that were added for them."""
        self._root = root

    def is_consequence(self, path: str, message: str, left_out: Set[str] | None = None) -> bool:
        """Whether a fault follows from one that was reported before. `left_out`: at that time, if not now."""
        left_out = self.left_out if left_out is None else left_out
        parents = {path[: match.start()] for match in re.finditer(r"\.", path)} | {path}
        is_named = any(names(message, one) for one in left_out)
        is_added = path in self._created
        return is_added or bool(parents & left_out) or is_named or any(one.startswith(f"{path}.") for one in left_out)

    def repeats_absence(self, path: str, message: str) -> bool:
        """Whether a fault of the user's code says again that something does not exist."""
        return path in self.absent or any(names(message, one) for one in self.absent)

    def written(self, path: str) -> str:
        """A setting under the name that the table has for it."""
        return self._renamed.get(path, path)

    def unknown_sections(self) -> Iterator[tuple[str, str]]:
        """The path and message of each fault; the sections are renamed or removed."""
        known = self._root.model_fields
        for name in [name for name in self.table if name not in known]:
            value = self.table.pop(name)
            advice = did_you_mean(name, known)
            right = next((one for one in known if f"{one!r}" in advice), None)
            if right is not None:
                yield name, f"unknown section{advice}"
                if right not in self.table:
                    self.table[right] = value
                    self._renamed[right] = name
                continue
            leaves = [(path, inner, suggestion(path, self._root)) for path, inner in _leaves(name, value)]
            for path, inner, found in leaves:
                if found.text:
                    yield path, f"unknown field{found.text}"
                    self._place(found.setting, inner, path)
            if not any(found.text for *_, found in leaves):
                yield name, f"unknown section; known are {', '.join(known)}"

    def sections(self, errors: Mapping[str, Iterable[ErrorDetails]]) -> list[tuple[str, str]]:
        """The path and message of each new error of some sections; the settings are renamed or left out."""
        before = frozenset(self.left_out)
        faults: list[tuple[str, str]] = []
        # Unknown fields first: one of them may be a required field, misspelt.
        for name, error in sorted(
            ((name, error) for name, found in errors.items() for error in found),
            key=lambda one: one[1]["type"] != "extra_forbidden",
        ):
            keys = (name, *error["loc"])
            path = ".".join(map(str, keys))
            is_missing = error["type"] == "missing"
            if path in self._renamed and is_missing:
                continue
            if len(keys) == 2 and not is_missing and not self._has(keys):
                continue  # derived from a setting that has the same error: a section's seed from run.seed
            message = plain_message(error, keys, self._root)
            if error["type"] == "extra_forbidden":
                self._place(suggestion(path, self._root).setting, self._remove(keys), path)
            else:
                path = self._leave_out(keys, message, is_missing=is_missing)
            if not self.is_consequence(path, message, before):
                faults.append((self.written(path), message))
        return faults

    def _leave_out(self, keys: Sequence[int | str], message: str, *, is_missing: bool) -> str:
        """Remove what an error refers to. Returns the path of the fault."""
        found: Any = self.table
        known: list[int | str] = []
        for key in keys:
            if not (isinstance(found, Mapping) and key in found):
                break
            found = found[key]
            known.append(key)
        path = ".".join(map(str, known if not is_missing else keys))
        # An error of a whole table names the fields that contradict each other.
        words = dict.fromkeys(re.findall(r"\w+", message)) if isinstance(found, Mapping) and not is_missing else {}
        named = [word for word in words if word in found]
        for gone in [[*known, word] for word in named] or [known or [keys[0]]]:
            self._remove(gone)
            self.left_out.add(".".join(map(str, gone)))
        return f"{path}.{named[0]}" if named else path or str(keys[0])

    def _has(self, keys: Sequence[int | str]) -> bool:
        inner = self.table.get(str(keys[0]))
        return isinstance(inner, Mapping) and keys[1] in inner

    def _remove(self, keys: Sequence[int | str]) -> Any:
        inner: Any = self.table
        for key in keys[:-1]:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        return inner.pop(keys[-1], None) if isinstance(inner, dict) else None

    def _place(self, path: str | None, value: Any, written: str) -> None:
        """Set `path` to what the table has under another name, unless it has both."""
        inner: Any = self.table
        *tables, field = (path or "").split(".")
        for depth, name in enumerate(tables, start=1):
            if isinstance(inner, dict) and name not in inner:
                inner[name] = {}
                self._created.add(".".join(tables[:depth]))
            inner = inner[name] if isinstance(inner, dict) else {}
        if path and tables and isinstance(inner, dict) and field not in inner:
            inner[field] = value
            self._renamed[path] = written


def names(message: str, setting: str) -> bool:
    """Whether a message contains the path of a setting, or of one in it. The name of a section is a common word."""
    return "." in setting and any(f"{word}.".startswith(f"{setting}.") for word in re.findall(r"[\w.-]+", message))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path, value
