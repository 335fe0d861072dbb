"""Payloads outside the database: one object for each, in a directory that all replicas see or in a bucket.

The row of a payload has the name, size and digest of its object. An object is stored before the row is committed, and its name is
used once: an object that no row names is the rest of a commit that failed.
"""

import errno
import os
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sqlite.segments import sync_directory

S3 = "s3://"
UNFINISHED = ".tmp"


class Objects(Protocol):
    """The objects of one location. Used by several threads.

    Raises `TransientError` while the location cannot be reached, and `StoreFaultError` for what a retry does not fix.
    """

    @property
    def location(self) -> str: ...

    def require(self) -> None:
        """Raise if objects cannot be stored here."""

    def put(self, name: str, body: bytes | memoryview) -> None:
        """Store an object durably."""

    def get(self, name: str) -> bytes | None:
        """None: there is no such object."""

    def delete(self, names: Iterable[str]) -> None:
        """Names without an object are ignored."""

    def names(self, *, older_than_s: float) -> Iterator[str]: ...


class ObjectDirectory:
    """Satisfies `Objects`."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._root = Path(location)

    def require(self) -> None:
        # It is not created: a file system that is not mounted would go unnoticed.
        if not self._root.is_dir():
            raise StoreFaultError(f"payload directory {self._root} does not exist: create it, or mount its file system")
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise StoreFaultError(f"payload directory {self._root} cannot be written by this user: change its owner")

    def put(self, name: str, body: bytes | memoryview) -> None:
        path = self._root / name
        unfinished = path.with_name(f"{path.name}{UNFINISHED}")
        try:
            self._make(path.parent)
            with unfinished.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync_directory(path.parent)
        except OSError as error:
            advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the file system"
            raise StoreFaultError(
                f"payload {path} cannot be written: {error.strerror}; {advice}; no acknowledged data is lost"
            ) from error

    def get(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            self.require()
            return None
        except OSError as error:
            raise StoreFaultError(f"payload {self._root / name} cannot be read: {error.strerror}") from error

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def names(self, *, older_than_s: float) -> Iterator[str]:
        until = time.time() - older_than_s
        for path in self._root.rglob("*"):
            if path.is_file() and path.stat().st_mtime < until:
                yield path.relative_to(self._root).as_posix()

    def _make(self, directory: Path) -> None:
        """Make a directory below the root durably."""
        if not directory.is_dir():
            if directory.parent != self._root:
                self._make(directory.parent)
            directory.mkdir(exist_ok=True, mode=0o700)
            sync_directory(directory.parent)


@cache
def objects_at(location: str) -> Objects:
    """The objects at an absolute path or at `s3://bucket/prefix`."""
    if not location.startswith(S3):
        return ObjectDirectory(location)
    objects: Objects = load_on_demand("rollbook.ledger.stores.s3:PayloadBucket")(location)
    return objects
