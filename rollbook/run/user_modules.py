"""Copies of the user's modules in the run directory, so that a run can be evaluated and replayed with the code it was trained with.

`modules/DIGEST/` has the modules that the configuration names and those that they import, as far as they are files in the user's
directories; installed packages are not copied. A resumed run whose code changed gets another folder. `modules.json` lists them.
"""

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.run.config.run import LoadedConfig
from rollbook.run.directory import RunDirectory, write_json

REFERENCE = re.compile(r"([A-Za-z_][\w.]*):\w+")
MAX_FILES, MAX_BYTES = 1_000, 20_000_000
"""More than this is not copied: it is no project of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCopy:
    """The modules of a run, or of a run from a resume on."""

    digest: str
    files: Mapping[str, str]
    """Where each file was, by its path in the copy."""

    def folder(self, directory: RunDirectory) -> Path:
        return directory.modules / self.digest

    def changed(self, directory: RunDirectory) -> list[str]:
        """Files whose original is missing or has other content now."""
        copy = self.folder(directory)
        return [name for name, source in self.files.items() if _content(Path(source)) != _content(copy / name)]


def copy_modules(loaded: LoadedConfig, directory: RunDirectory) -> None:
    """Copy the user's modules by content, unless the last copy is the same."""
    found = user_modules(loaded, ignored=directory.path)
    if not found:
        return
    contents = {name: source.read_bytes() for name, source in sorted(found.items())}
    whole = hashlib.blake2b(digest_size=8)
    for name, content in contents.items():
        whole.update(f"{name}\n{len(content)}\n".encode() + content)
    copy = ModuleCopy(digest=whole.hexdigest(), files={name: str(found[name]) for name in contents})
    for name, content in contents.items():
        path = copy.folder(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    copies = module_copies(directory)
    if not copies or copies[-1] != copy:
        write_json(directory.modules_file, [asdict(entry) for entry in (*copies, copy)])


def module_copies(directory: RunDirectory) -> list[ModuleCopy]:
    """Oldest first; empty for a run without modules of a user, or of an earlier version."""
    try:
        return json_decoder(list[ModuleCopy]).decode(directory.modules_file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return []


def recorded_modules(directory: RunDirectory) -> tuple[list[Path], str | None]:
    """The directory of the last copy, to be searched first, and a sentence if the present code differs from it."""
    copies = module_copies(directory)
    if not copies or not copies[-1].folder(directory).is_dir():
        return [], None
    changed = copies[-1].changed(directory)
    note = None
    if changed:
        note = (
            f"{', '.join(changed)} changed since the run was trained; the run's own copy is used "
            f"({copies[-1].folder(directory)})"
        )
    return [copies[-1].folder(directory)], note


def user_modules(loaded: LoadedConfig, *, ignored: Path) -> dict[str, Path]:
    """Files of the modules that the configuration names, and of those that they import, by their path below a search directory.

    `ignored`: what is in this directory is not copied.
    """
    config = loaded.config
    names = [match[1] for text in _texts(config.model_dump(mode="json")) if (match := REFERENCE.fullmatch(text))]
    names += [name for name in (config.rollout.function, config.env.name) if ":" not in name]
    places = [path for path in loaded.search_path if path != ignored and ignored not in path.parents]
    found: dict[str, Path] = {}
    size, pending = 0, list(dict.fromkeys(names))
    while pending:
        for name, file in _files_of(pending.pop(), places):
            size += 0 if name in found else file.stat().st_size
            if name in found:
                continue
            if len(found) >= MAX_FILES or size > MAX_BYTES:
                return {}
            found[name] = file
            pending += _imported(file, name)
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _files_of(module: str, places: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The file of a module and those of its packages; none if it is not in the user's directories."""
    parts = module.split(".")
    if parts[0] == "rollbook":
        return
    for place in places:
        files = [Path(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
        files.append(Path(*parts[:-1], f"{parts[-1]}.py"))
        present = [file for file in files if (place / file).is_file()]
        if any(file in present for file in files[-2:]):
            yield from ((file.as_posix(), place / file) for file in present)
            return


def _imported(file: Path, name: str) -> list[str]:
    """Names of modules that a file imports, and of their attributes, which may be modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    package = Path(name).parent.parts
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
    return [module for module in found if module]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
