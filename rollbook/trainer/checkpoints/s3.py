"""Shards of checkpoints in a bucket. Imported only with `trainer.shards_path = "s3://…"`, because boto3 is an extra."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from rollbook.access.object_store import ObjectStore

READ_AHEAD_BYTES = 8 << 20


class S3Shards:
    """Satisfies `ShardStorage`."""

    def __init__(self, location: str) -> None:
        self._store = ObjectStore(location)
        self.location = self._store.location

    def folders(self) -> set[str]:
        return {found.name.partition("/")[0] for found in self._store.listed()}

    def files(self, folder: str) -> dict[str, int]:
        return {found.name.removeprefix(f"{folder}/"): found.size for found in self._store.listed(f"{folder}/")}

    def remove(self, folder: str) -> None:
        self._store.delete(found.name for found in self._store.listed(f"{folder}/"))

    def writer(self, folder: str) -> FileSystemWriter:
        writer = FileSystemWriter(folder)
        writer.fs, writer.path = S3Files(self._store), f"{self.location}/{folder}"  # type: ignore[assignment]  # as in its subclass for fsspec
        return writer

    def reader(self, folder: str) -> FileSystemReader:
        reader = FileSystemReader(folder)
        reader.fs, reader.path = S3Files(self._store), f"{self.location}/{folder}"  # type: ignore[assignment]
        return reader


class S3Files(FileSystemBase):
    """The operations with which `torch.distributed.checkpoint` reads and writes files below the location of the store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with io.BufferedReader(_ObjectReader(self._store, self._name(path)), READ_AHEAD_BYTES) as stream:
                yield stream
            return
        # An object becomes visible when it is complete. The caller may close the stream.
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "object"
            with file.open("wb") as stream:
                yield stream
            self._store.upload(self._name(path), file)

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        self._store.rename(self._name(path), self._name(new_path))

    def mkdir(self, path: Any) -> None:
        """A bucket has no directories."""

    def exists(self, path: Any) -> bool:
        name = self._name(path)
        return any(found.name == name for found in self._store.listed(name))

    def rm_file(self, path: Any) -> None:
        self._store.delete([self._name(path)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).startswith("s3://")

    def _name(self, path: Any) -> str:
        return str(path).removeprefix(f"{self._store.location}/")


class _ObjectReader(io.RawIOBase):
    """Reads ranges of an object, so that a rank fetches only its own part of a shard."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name, self._at = store, name, 0
        self._size = store.size(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        data = self._store.get_range(self._name, self._at, length)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
