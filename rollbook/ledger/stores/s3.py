"""Payloads in a bucket. Imported only with `ledger.payloads = "s3://…"`, because boto3 is an extra.

Credentials, region and endpoint are those of the AWS configuration: environment variables, files, or the role of the machine.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3  # type: ignore[import-untyped]  # the package ships no types
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
)

from rollbook.contracts.errors import TransientError
from rollbook.ledger.store import StoreFaultError

CONNECT_S = 5
READ_S = 20
ATTEMPTS = 3
CONNECTIONS = 32
RETRY_AFTER_S = 1.0
NAMES_PER_DELETE = 1000
"""The limit of one request."""
MISSING = ("NoSuchKey", "404")
BUSY = ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "ServiceUnavailable", "InternalError")


class Bucket:
    """Satisfies `objects.Objects`."""

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
        with self._explained():
            self._client.head_bucket(Bucket=self._bucket)

    def put(self, name: str, body: bytes | memoryview) -> None:
        with self._explained():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=bytes(body))

    def get(self, name: str) -> bytes | None:
        with self._explained():
            try:
                body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
            except ClientError as error:
                if error.response["Error"]["Code"] in MISSING:
                    return None
                raise
            return body

    def delete(self, names: Iterable[str]) -> None:
        left = list(names)
        while left:
            some, left = left[:NAMES_PER_DELETE], left[NAMES_PER_DELETE:]
            with self._explained():
                keys = {"Objects": [{"Key": self._prefix + name} for name in some], "Quiet": True}
                self._client.delete_objects(Bucket=self._bucket, Delete=keys)

    def names(self, *, older_than_s: float) -> Iterator[str]:
        until = time.time() - older_than_s
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                for row in page.get("Contents", []):
                    if row["LastModified"].timestamp() < until:
                        yield row["Key"].removeprefix(self._prefix)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status >= 500 or code in BUSY:
                raise self._unreachable(error) from error
            raise StoreFaultError(
                f"payloads in {self.location}: {error}; correct the bucket's name or the permissions of this machine"
            ) from error
        except (HTTPClientError, EndpointConnectionError) as error:
            raise self._unreachable(error) from error
        except BotoCoreError as error:
            raise StoreFaultError(f"payloads in {self.location}: {error}; correct the AWS configuration") from error

    def _unreachable(self, error: Exception) -> TransientError:
        return TransientError(
            f"payloads in {self.location} cannot be reached ({error}); try again", retry_after_s=RETRY_AFTER_S
        )
