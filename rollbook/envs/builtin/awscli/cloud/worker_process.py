"""The main function of an AWS CLI process: the CLI kept warm, one command after the other, never a shell.

Messages are JSON: `run` runs one command line of the agent, `calls` calls the API. Plain operations run here, the others in a fork
that is killed when it exceeds its time. Both are confined to the scratch directory and the one endpoint.
"""

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

from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.envs.builtin.awscli.cloud.api import Api
from rollbook.envs.builtin.awscli.cloud.warm_cli import WarmCli
from rollbook.envs.sandboxes.confinement import Permissions, confine, interpreter_roots, limit_resources, package_root

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 64 * 2**20
TIMED_OUT = 124
DIED = 137
MESSAGE_BYTES = 2**16
# A command leaves about half a megabyte of garbage: 64 of them are collected within 50 ms.
MESSAGES_BETWEEN_COLLECTIONS = 64


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
