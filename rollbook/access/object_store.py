"""Objects in a bucket, for payloads of the ledger and shards of checkpoints. The only module that imports boto3, which is an extra.

Credentials, region and endpoint are those of the AWS configuration: environment variables, files, or the role of the machine.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]  # the package ships no types
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
)

CONNECT_S = 5
READ_S = 20
ATTEMPTS = 3
CONNECTIONS = 32
NAMES_PER_DELETE = 1000
"""The limit of one request."""
MISSING = ("NoSuchKey", "404")
BUSY = ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "ServiceUnavailable", "InternalError")


@dataclass(frozen=True, slots=True)
class StoredObject:
    name: str
    size: int
    changed_at: float


class ObjectStore:
    """The objects below `s3://bucket/prefix`, by name. Used by several threads. A failure is an `OSError` (see `failure`)."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self._bucket, _, prefix = self.location.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
        self._client: Any = boto3.client(
            "s3",
            config=Config(
                connect_timeout=CONNECT_S, read_timeout=READ_S, retries=retries, max_pool_connections=CONNECTIONS
            ),
        )

    def require(self) -> None:
        """Raise if the bucket cannot be used."""
        with self._explained():
            self._client.head_bucket(Bucket=self._bucket)

    def put(self, name: str, body: bytes | memoryview) -> None:
        with self._explained():
            self._client.put_object(**self._key(name), Body=bytes(body))

    def upload(self, name: str, file: Path) -> None:
        """Store a file, in several parts if it is large. The object becomes visible when it is complete."""
        with self._explained():
            self._client.upload_file(str(file), self._bucket, self._prefix + name)

    def get(self, name: str) -> bytes | None:
        """None: there is no such object."""
        with self._explained():
            try:
                body: bytes = self._client.get_object(**self._key(name))["Body"].read()
            except ClientError as error:
                if error.response["Error"]["Code"] in MISSING:
                    return None
                raise
            return body

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._explained():
            part = f"bytes={start}-{start + length - 1}"
            body: bytes = self._client.get_object(**self._key(name), Range=part)["Body"].read()
            return body

    def size(self, name: str) -> int:
        with self._explained():
            return int(self._client.head_object(**self._key(name))["ContentLength"])

    def rename(self, name: str, new: str) -> None:
        with self._explained():
            self._client.copy_object(**self._key(new), CopySource=self._key(name))
            self._client.delete_object(**self._key(name))

    def delete(self, names: Iterable[str]) -> None:
        """Names without an object are ignored."""
        left = list(names)
        while left:
            some, left = left[:NAMES_PER_DELETE], left[NAMES_PER_DELETE:]
            with self._explained():
                keys = {"Objects": [{"Key": self._prefix + name} for name in some], "Quiet": True}
                self._client.delete_objects(Bucket=self._bucket, Delete=keys)

    def listed(self, start: str = "") -> Iterator[StoredObject]:
        """The objects whose names begin with `start`."""
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + start):
                for row in page.get("Contents", []):
                    name = row["Key"].removeprefix(self._prefix)
                    yield StoredObject(name, row["Size"], row["LastModified"].timestamp())

    def failure(self, cause: Exception, advice: str | None) -> Exception:
        """The exception to raise. Without `advice` the store cannot be reached now, and another attempt may succeed."""
        return OSError(f"{type(cause).__name__}: {cause}")

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status >= 500 or code in BUSY:
                raise self.failure(error, None) from error
            raise self.failure(error, "correct the bucket's name or the permissions of this machine") from error
        except (HTTPClientError, EndpointConnectionError) as error:
            raise self.failure(error, None) from error
        except (BotoCoreError, boto3.exceptions.Boto3Error) as error:
            raise self.failure(error, "correct the AWS configuration") from error
