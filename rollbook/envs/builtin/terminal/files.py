"""A small file tree in memory, with absolute and relative paths, directories and limits.

The agent's commands cannot reach a file of the machine.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

MAX_ENTRIES = 2_000
MAX_BYTES = 1_000_000
# As on a real file system. Without them, a copy of a deep tree costs entries times levels.
MAX_LEVELS = 64
MAX_NAME_CHARS = 255
# The limit of one command line: characters that are read, written or passed through a pipe, and entries that are visited. It takes
# about a second. A limit of time would depend on the load of the machine, and episodes could not be repeated.
MAX_WORK = 16_000_000
# Visiting an entry of the tree, or handling a line, takes as long as copying this many characters.
ENTRY_WORK = 200
LINE_WORK = 40
LEVEL_WORK = 20
ROOT = PurePosixPath("/")


class CommandError(Exception):
    """The error of a command, shown to the agent."""


class FileTree:
    def __init__(self) -> None:
        self.cwd = PurePosixPath("/home")
        self._files: dict[PurePosixPath, str] = {}
        self._directories: set[PurePosixPath] = {ROOT, self.cwd}
        self._used_chars = 0
        self._work = 0

    def start_line(self) -> None:
        """Begin a new command line, with a new limit for its work."""
        self._work = 0

    def count_work(self, *, chars: int = 0, lines: int = 0, entries: int = 0, levels: int = 0) -> None:
        """Raises `CommandError` when the command line has done too much work. `levels`: of the paths of all visited entries."""
        self._work += chars + lines * LINE_WORK + entries * ENTRY_WORK + levels * LEVEL_WORK
        if self._work > MAX_WORK:
            raise CommandError("stopped: the command line reads or writes too much")

    def path(self, name: str) -> PurePosixPath:
        """The absolute path without `.` and `..`. The parent of the root is the root. Raises `CommandError` if it is too long."""
        parts: list[str] = []
        for part in (self.cwd / name).parts[1:]:
            if part == "..":
                del parts[-1:]
            elif part != ".":
                parts.append(part)
        return _checked(ROOT.joinpath(*parts))

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
        text = self._files[path]
        self.count_work(chars=len(text), lines=text.count("\n"))
        return text

    def write(self, name: str, text: str, *, append: bool = False) -> None:
        path = self.path(name)
        if self.is_directory(path):
            raise CommandError(f"{name}: Is a directory")
        if not self.is_directory(path.parent):
            raise CommandError(f"{name}: No such file or directory")
        self.count_work(chars=len(text), entries=1, levels=len(path.parts))
        old = self._files.get(path, "")
        text = old + text if append else text
        if (
            self._used_chars - len(old) + len(text) > MAX_BYTES
            or len(self._files) + len(self._directories) >= MAX_ENTRIES
        ):
            raise CommandError(f"{name}: No space left on device")
        self._used_chars += len(text) - len(old)
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
        return sorted(p for p in self._visited() if p.parts[:-1] == path.parts and p != ROOT)

    def below(self, path: PurePosixPath) -> list[PurePosixPath]:
        """The path and everything below it, parents first."""
        if self.is_file(path):
            return [path]
        parts = path.parts
        return sorted(p for p in self._visited() if p.parts[: len(parts)] == parts)

    def remove(self, path: PurePosixPath) -> None:
        for entry in self.below(path):
            self._used_chars -= len(self._files.pop(entry, ""))
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

    def _visited(self) -> list[PurePosixPath]:
        """All entries, whose visit is counted."""
        entries = [*self._files, *self._directories]
        self.count_work(entries=len(entries), levels=sum(len(path.parts) for path in entries))
        return entries

    def _add(self, paths: list[PurePosixPath], name: str) -> None:
        self.count_work(entries=len(paths), levels=sum(len(_checked(path).parts) for path in paths))
        if len(self._files) + len(self._directories) + len(paths) > MAX_ENTRIES:
            raise CommandError(f"{name}: No space left on device")
        self._directories.update(paths)


def _checked(path: PurePosixPath) -> PurePosixPath:
    if len(path.parts) - 1 > MAX_LEVELS or any(len(part) > MAX_NAME_CHARS for part in path.parts):
        raise CommandError(
            f"{path.name[:20]}: File name too long: a path has at most {MAX_LEVELS} names of {MAX_NAME_CHARS} characters"
        )
    return path
