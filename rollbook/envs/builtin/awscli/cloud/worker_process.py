"""The main function of an AWS CLI process: the CLI kept warm, one command after the other, never a shell.

Messages are JSON: `run` runs one command line of the agent, `calls` calls the API. Plain operations run here, the others in a fork
that is killed when it exceeds its time. Both are confined to the scratch directory and the one endpoint.
"""

import base64
import datetime
import gc
import itertools
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import awscli  # type: ignore[import-untyped]  # noqa: F401 - first: it brings its own botocore under this name
from botocore.config import Config  # type: ignore[import-untyped]  # the package ships no types
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    HTTPClientError,
    ParamValidationError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.session import Session  # type: ignore[import-untyped]

from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.envs.builtin.awscli.cloud.warm_cli import WarmCli
from rollbook.envs.sandboxes.confinement import Permissions, confine, interpreter_roots, limit_resources, package_root

# Grading reads only small files; the rest of a longer body is not read.
BODY_BYTES = 2**18
MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 64 * 2**20
TIMED_OUT = 124
DIED = 137
MESSAGE_BYTES = 2**16
# A command leaves about half a megabyte of garbage: 64 of them are collected within 50 ms.
MESSAGES_BETWEEN_COLLECTIONS = 64


class Api:
    """API calls for set-up checks and grading, which the agent cannot observe. Cached clients, one for each service and region."""

    def __init__(self, *, endpoint: str | None, loader: Any) -> None:
        self._endpoint = endpoint
        self._session = Session()
        self._session.register_component("data_loader", loader)
        self._clients: dict[tuple[str, str | None], Any] = {}

    def call_all(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, in order: a result, an error code, or the reason why there is no answer."""
        return [self._call(**call) for call in calls]

    def client(self, service: str, region: str | None = None) -> Any:
        client = self._clients.get((service, region))
        if client is None:
            config = Config(retries={"max_attempts": 0}, connect_timeout=5, read_timeout=15)
            client = self._clients[service, region] = self._session.create_client(
                service, region_name=region, endpoint_url=self._endpoint, config=config
            )
        return client

    def _call(
        self, *, service: str, operation: str, params: dict[str, Any], region: str | None = None
    ) -> dict[str, Any]:
        try:
            return {"result": plain(getattr(self.client(service, region), operation)(**params))}
        except ClientError as error:
            return {"code": error.response["Error"].get("Code", ""), "message": str(error)}
        except (HTTPClientError, NoConnectionError) as error:
            return {"unreachable": str(error)}
        except (ParamValidationError, BotoCoreError, AttributeError, TypeError) as error:
            return {"invalid": f"{service}.{operation}: {type(error).__name__}: {error}"}


def plain(value: Any) -> Any:
    """An API response as JSON values."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if key != "ResponseMetadata"}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if hasattr(value, "read"):
        value = value.read(BODY_BYTES)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(bytes(value)).decode("ascii")
    return value


def run_in_fork(
    play: Callable[[], dict[str, Any]], *, within_s: float, quit_fd: int, prepare: Callable[[], None]
) -> dict[str, Any]:
    """Run in a forked process. Kill it when it exceeds its time, or when the peer of `quit_fd`, our parent, is gone."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _fork_main(theirs, play, prepare)
    theirs.close()
    try:
        with ours:
            return _reply(ours, time.monotonic() + within_s, quit_fd) or {
                "rc": DIED,
                "stdout": "",
                "stderr": "the command was stopped: it used too much memory or crashed",
            }
    except TimeoutError:
        limit_text = f"the command did not finish within {within_s:g} s and was stopped"
        return {"rc": TIMED_OUT, "stdout": "", "stderr": limit_text}
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_main(channel: socket.socket, play: Callable[[], dict[str, Any]], prepare: Callable[[], None]) -> None:
    """Runs in the fork. Never returns into the code of the parent."""
    try:
        prepare()
        channel.sendall(json.dumps(play()).encode() + b"\n")
    except BaseException as error:  # the parent notices the closed channel
        os.write(2, f"fork: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def _reply(channel: socket.socket, until: float, quit_fd: int) -> dict[str, Any] | None:
    """The fork's reply; None when it ended without one. Raises `TimeoutError`."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(quit_fd, select.POLLHUP)
    parts: list[bytes] = []
    while (left := until - time.monotonic()) > 0:
        ready = dict(poll.poll(left * 1000))
        if quit_fd in ready:
            raise SystemExit(0)
        if channel.fileno() in ready:
            parts.append(channel.recv(MESSAGE_BYTES))
            if parts[-1].endswith(b"\n"):
                reply: dict[str, Any] = json.loads(b"".join(parts))
                return reply
            if not parts[-1]:
                return None
    raise TimeoutError


def main() -> None:
    parent = BlockingFrames(connect_to_parent(int(sys.argv[1])))
    settings = json.loads(sys.argv[2])
    endpoint, command_s = settings["endpoint"], float(settings["command_s"])
    scratch = Path(settings["scratch"])
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    cli = WarmCli(endpoint=endpoint, max_output_bytes=int(settings["max_output_bytes"]), read_s=command_s)
    api = Api(endpoint=endpoint, loader=cli.loader)
    limit_resources(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    permissions = Permissions(
        writable=(str(scratch),),
        readable=interpreter_roots(),
        # The task bank of this package holds the solutions. All of its modules that this process needs are loaded.
        hidden=(package_root(),),
        ports=frozenset() if endpoint is None else frozenset({int(endpoint.rpartition(":")[2])}),
        is_online=endpoint is None,
    )

    def prepare() -> None:
        parent.close()
        kill_with_parent()
        confine(permissions)

    def run(argv: list[str]) -> dict[str, Any]:
        return cli.run(argv) or run_in_fork(
            lambda: cli.run_once(argv), within_s=command_s, quit_fd=parent.fileno(), prepare=prepare
        )

    cli.warm_up()
    confine(replace(permissions, may_fork=True))
    # The garbage collector would spend a third of a command's time on permanent service descriptions. Collect between commands.
    gc.collect()
    gc.freeze()
    gc.disable()
    parent.send(b"{}")  # ready
    for number in itertools.count(1):
        payload = parent.receive()
        if payload is None:
            break
        message = json.loads(payload)
        reply = {"answers": api.call_all(message["calls"])} if "calls" in message else run(message["run"])
        parent.send(json.dumps(reply).encode())
        if number % MESSAGES_BETWEEN_COLLECTIONS == 0:
            gc.collect()


if __name__ == "__main__":
    main()
