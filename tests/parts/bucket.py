"""A bucket of MiniStack, which serves the API of S3 on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import boto3  # type: ignore[import-untyped]  # the package ships no types

from rollbook.concurrency.sockets import listening_socket


@contextmanager
def bucket_of_ministack(name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of the server. Clients find it by environment variables."""
    with listening_socket("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        bind = f"fd://{sock.fileno()}"
        server = subprocess.Popen(
            [sys.executable, "-m", "hypercorn", "ministack.app:app", "--workers", "0", "--bind", bind],
            pass_fds=[sock.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with patch.dict(os.environ, settings):
            boto3.client("s3").create_bucket(Bucket=name)
            yield server
    finally:
        server.kill()
        server.wait()
