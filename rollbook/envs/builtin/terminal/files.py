"""A small file tree in memory, with absolute and relative paths, directories and limits.

The agent's commands cannot reach a file of the machine.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

MAX_ENTRIES = 2_000
MAX_BYTES = 1_000_000
ROOT = PurePosixPath("/")


class CommandError(Exception):
    """The error of a command, shown to the agent."""


class FileTree:
    def __init__(self) -> None:
        self.cwd = PurePosixPath("/home")
        self._files: dict[PurePosixPath, str] = {}
        self._directories: set[PurePosixPath] = {ROOT, self.cwd}

    def path(self, name: str) -> PurePosixPath:
        """The absolute path without `.` and `..`. The parent of the root is the root."""
        parts: list[str] = []
        for part in (self.cwd / name).parts[1:]:
            if part == "..":
                parts = parts[:-1]
            elif part != ".":
                parts.append(part)
        return ROOT.joinpath(*parts)

    def is_file(self, path: PurePosixPath) -> bool:
        return path in self._files

    def is_directory(self, path: PurePosixPath) -> bool:
        return path in self._directories

    def read(self, name: str) -> str:
        path = self.path(name)
        if self.is_directory(path):
            raise CommandError(f"{name}: Is a directory")
        if not self.is_file(path):
            raise CommandError(f"{name}: No such file or directory")
        return self._files[path]

    def write(self, name: str, text: str, *, append: bool = False) -> None:
        path = self.path(name)
        if self.is_directory(path):
            raise CommandError(f"{name}: Is a directory")
        if not self.is_directory(path.parent):
            raise CommandError(f"{name}: No such file or directory")
        text = self._files.get(path, "") + text if append else text
        used = sum(len(content) for other, content in self._files.items() if other != path)
        if used + len(text) > MAX_BYTES or len(self._files) + len(self._directories) >= MAX_ENTRIES:
            raise CommandError(f"{name}: No space left on device")
        self._files[path] = text

    def make_directory(self, name: str, *, parents: bool = False) -> None:
        path = self.path(name)
        if parents:
            missing = [p for p in (path, *path.parents) if not self.is_directory(p)]
            if any(self.is_file(p) for p in missing):
                raise CommandError(f"{name}: Not a directory")
            self._add(missing, name)
        elif self.is_file(path) or self.is_directory(path):
            raise CommandError(f"{name}: File exists")
        elif not self.is_directory(path.parent):
            raise CommandError(f"{name}: No such file or directory")
        else:
            self._add([path], name)

    def children(self, path: PurePosixPath) -> list[PurePosixPath]:
        return sorted(p for p in (*self._files, *self._directories) if p.parent == path and p != ROOT)

    def below(self, path: PurePosixPath) -> list[PurePosixPath]:
        """The path and everything below it, parents first."""
        return sorted(p for p in (*self._files, *self._directories) if p == path or path in p.parents)

    def remove(self, path: PurePosixPath) -> None:
        for entry in self.below(path):
            self._files.pop(entry, None)
            self._directories.discard(entry)

    def copy(self, source: PurePosixPath, target: PurePosixPath) -> None:
        if target == source or source in target.parents:
            raise CommandError(f"{source}: cannot be copied into itself")
        for entry in self.below(source):
            to = target / entry.relative_to(source) if entry != source else target
            if self.is_directory(entry):
                if not self.is_directory(to):
                    self._add([to], str(to))
            else:
                self.write(str(to), self._files[entry])

    def files(self) -> Iterator[tuple[str, str]]:
        return ((str(path), text) for path, text in sorted(self._files.items()))

    def _add(self, paths: list[PurePosixPath], name: str) -> None:
        if len(self._files) + len(self._directories) + len(paths) > MAX_ENTRIES:
            raise CommandError(f"{name}: No space left on device")
        self._directories.update(paths)
