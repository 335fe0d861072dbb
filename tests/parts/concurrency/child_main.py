"""A child process for tests: `python -m tests.parts.concurrency.child_main CHANNEL_FD BEHAVIOUR`."""

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames, frame
from rollbook.concurrency.child_process.process import ChildProcess, ChildSpec
from rollbook.concurrency.child_process.template import use_own_template


def echo(parent: BlockingFrames) -> None:
    while (payload := parent.receive()) is not None:
        if payload == b"stop":
            break
        parent.send(payload)


def ignore_requests(parent: BlockingFrames) -> None:
    while parent.receive() is not None:
        pass


def wait(parent: BlockingFrames) -> None:
    time.sleep(600)


def start_grandchild(parent: BlockingFrames) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parent.send(str(grandchild.pid).encode())
    time.sleep(600)


async def start_children(parent: BlockingFrames, template_fd: int) -> None:
    """Start a child of its own and pass on its facts; again on each message."""
    use_own_template(template_fd)
    while True:
        command = ChildSpec(module="tests.parts.concurrency.child_main", arguments=["facts"], may_fork=True)
        child = await ChildProcess.start(command)
        await child.receive()
        parent.send(await child.receive())
        await child.kill()
        if parent.receive() is None:
            return


def facts() -> dict[str, Any]:
    """What a child can say about itself."""
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "directory": str(Path.cwd()),
        "variable": os.environ.get("CHILD_VARIABLE"),
        "arguments": sys.argv[2:],
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "was_forked": "tests.parts.concurrency.imported_once" in sys.modules,
        "random": [random.random(), float(np.random.random())],
        "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "threads": threading.active_count(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def main(channel_fd: int, behaviour: str) -> int:
    first = facts() if behaviour == "facts" else {}
    sock = connect_to_parent(channel_fd)
    if behaviour == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "killed_with_parent":
        kill_with_parent()
    else:
        die_with_parent(channel_fd, grace_s=0.3)
    parent = BlockingFrames(sock)
    print("first line", flush=True)  # noqa: T201
    parent.send(b"ready")
    match behaviour:
        case "echo" | "killed_with_parent":
            echo(parent)
        case "ignore_requests":
            ignore_requests(parent)
        case "exit_3":
            print("last line", flush=True)  # noqa: T201
            return 3
        case "half_a_frame":
            sock.sendall(frame(b"never finished")[:10])
            os._exit(0)
        case "grandchild":
            start_grandchild(parent)
        case "facts":
            parent.send(json.dumps(first).encode())
            echo(parent)
        case "start_children":
            asyncio.run(start_children(parent, int(sys.argv[3])))
        case "write_to_descriptor":
            os.write(int(sys.argv[3]), b"written by the child")
        case _:
            wait(parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
