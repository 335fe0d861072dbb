"""Shards of checkpoints in a bucket. Imported only with `trainer.shards_path = "s3://…"`, because boto3 is an extra.

Credentials, region and endpoint are those of the AWS configuration: environment variables, files, or the role of the machine.
"""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]  # the package ships no types
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

READ_AHEAD_BYTES = 8 << 20


@cache
def _client() -> Any:
    return boto3.client("s3")


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, boto3.exceptions.Boto3Error) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class S3Shards:
    """Satisfies `ShardStorage`."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self._bucket, _, prefix = self.location.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def folders(self) -> set[str]:
        return {name.partition("/")[0] for name in self._objects(self._prefix)}

    def files(self, folder: str) -> dict[str, int]:
        return self._objects(f"{self._prefix}{folder}/")

    def remove(self, folder: str) -> None:
        with _as_os_errors():
            for name in self.files(folder):
                _client().delete_object(Bucket=self._bucket, Key=f"{self._prefix}{folder}/{name}")

    def writer(self, folder: str) -> FileSystemWriter:
        writer = FileSystemWriter(folder)
        writer.fs, writer.path = S3Files(), f"{self.location}/{folder}"  # type: ignore[assignment]  # as in its subclass for fsspec
        return writer

    def reader(self, folder: str) -> FileSystemReader:
        reader = FileSystemReader(folder)
        reader.fs, reader.path = S3Files(), f"{self.location}/{folder}"  # type: ignore[assignment]
        return reader

    def _objects(self, prefix: str) -> dict[str, int]:
        """The objects below a prefix, with their sizes."""
        with _as_os_errors():
            pages = _client().get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return {row["Key"].removeprefix(prefix): row["Size"] for page in pages for row in page.get("Contents", [])}


class S3Files(FileSystemBase):
    """The operations with which `torch.distributed.checkpoint` reads and writes files, for paths `s3://bucket/key`."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        bucket, key = _split(path)
        if mode == "rb":
            with io.BufferedReader(_ObjectReader(bucket, key), READ_AHEAD_BYTES) as stream:
                yield stream
            return
        # An object becomes visible when it is complete. The caller may close the stream.
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "object"
            with file.open("wb") as stream:
                yield stream
            with _as_os_errors():
                _client().upload_file(str(file), bucket, key)

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        (bucket, old), (_, new) = _split(path), _split(new_path)
        with _as_os_errors():
            _client().copy_object(Bucket=bucket, Key=new, CopySource={"Bucket": bucket, "Key": old})
        self.rm_file(path)

    def mkdir(self, path: Any) -> None:
        """A bucket has no directories."""

    def exists(self, path: Any) -> bool:
        bucket, key = _split(path)
        with _as_os_errors():
            found = _client().list_objects_v2(Bucket=bucket, Prefix=key)
            return any(row["Key"] == key for row in found.get("Contents", []))

    def rm_file(self, path: Any) -> None:
        bucket, key = _split(path)
        with _as_os_errors():
            _client().delete_object(Bucket=bucket, Key=key)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).startswith("s3://")


class _ObjectReader(io.RawIOBase):
    """Reads ranges of an object, so that a rank fetches only its own part of a shard."""

    def __init__(self, bucket: str, key: str) -> None:
        self._bucket, self._key, self._at = bucket, key, 0
        with _as_os_errors():
            self._size = int(_client().head_object(Bucket=bucket, Key=key)["ContentLength"])

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
        with _as_os_errors():
            part = f"bytes={self._at}-{self._at + length - 1}"
            data = _client().get_object(Bucket=self._bucket, Key=self._key, Range=part)["Body"].read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _split(path: str | Path) -> tuple[str, str]:
    bucket, _, key = str(path).removeprefix("s3://").partition("/")
    return bucket, key
