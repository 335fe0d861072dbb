"""The worker's own process: the AWS CLI kept warm, one command after the other, never a shell.

Its parent runs it as `python -m rollbook.envs.builtin.awscli.cloud.worker_process SETTINGS` and speaks JSON lines on stdin
and stdout. Two verbs:
`run` plays one command line of the agent; `calls` asks the API. Plain operations are played here, the rest in a fork that is killed
when its time is over. Both are confined to the scratch directory and the one endpoint. When the parent is gone, all end.
"""

import gc
import io
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

from rollbook.concurrency.parent_watch import die_with_parent
from rollbook.envs.builtin.awscli.cloud.api import Api
from rollbook.envs.builtin.awscli.cloud.warm_cli import WarmCli
from rollbook.envs.sandboxes.confinement import Reach, confine, interpreter_roots, limit

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 64 * 2**20
TIMED_OUT = 124
DIED = 137
MESSAGE_BYTES = 2**16
# A command leaves about half a megabyte behind: some thirty are swept at a time, within 50 ms.
MESSAGES_BETWEEN_COLLECTIONS = 64


def play_in_fork(
    play: Callable[[], dict[str, Any]], *, within_s: float, quit_fd: int, prepare: Callable[[], None]
) -> dict[str, Any]:
    """Play in a process of its own; killed when its time is over, or when `quit_fd` says that our parent is gone."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_a_fork(theirs, play, prepare)
    theirs.close()
    try:
        with ours:
            return _answer(ours, time.monotonic() + within_s, quit_fd) or {
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


def _be_a_fork(channel: socket.socket, play: Callable[[], dict[str, Any]], prepare: Callable[[], None]) -> None:
    """The life of a fork. It never returns into the code of its parent."""
    try:
        prepare()
        channel.sendall(json.dumps(play()).encode() + b"\n")
    except BaseException as error:  # nothing may climb into the parent's loop, which hears of it by the closed channel
        os.write(2, f"fork: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def _answer(channel: socket.socket, until: float, quit_fd: int) -> dict[str, Any] | None:
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
                answer: dict[str, Any] = json.loads(b"".join(parts))
                return answer
            if not parts[-1]:
                return None
    raise TimeoutError


def main() -> None:
    settings = json.loads(sys.argv[1])
    endpoint, command_s = settings["endpoint"], float(settings["command_s"])
    scratch = Path(settings["scratch"])
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    cli = WarmCli(endpoint=endpoint, max_output_bytes=int(settings["max_output_bytes"]), read_s=command_s)
    api = Api(endpoint=endpoint, loader=cli.loader)
    commands, replies = sys.stdin.buffer, sys.stdout.buffer
    # What a command reads from its stdin is empty; the channel is ours alone.
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    limit(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    reach = Reach(
        writable=(str(scratch),),
        readable=interpreter_roots(),
        ports=frozenset() if endpoint is None else frozenset({int(endpoint.rpartition(":")[2])}),
        is_online=endpoint is None,
    )

    def prepare() -> None:
        commands.close()
        replies.close()
        die_with_parent(int(settings["watch_fd"]))
        confine(reach)

    def run(argv: list[str]) -> dict[str, Any]:
        return cli.run(argv) or play_in_fork(
            lambda: cli.run_once(argv), within_s=command_s, quit_fd=commands.fileno(), prepare=prepare
        )

    def say(message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    cli.warm_up()
    confine(replace(reach, may_fork=True))
    # The collector takes a third of a command's time to look at service descriptions that live for ever. It works between commands.
    gc.collect()
    gc.freeze()
    gc.disable()
    say({"ready": True})
    for number, line in enumerate(commands, start=1):
        message = json.loads(line)
        say({"answers": api.ask(message["calls"])} if "calls" in message else run(message["run"]))
        if number % MESSAGES_BETWEEN_COLLECTIONS == 0:
            gc.collect()


if __name__ == "__main__":
    main()
