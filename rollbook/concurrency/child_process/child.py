"""The child's side: take over the connection, send heartbeats, and end when the parent ends.

A parent can be killed without any chance to stop its children. Its end of the connection is then closed by the kernel, on every
Unix. `die_with_parent` watches for that in a thread. `kill_with_parent` leaves it to the kernel (Linux only).
"""

import asyncio
import atexit
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

STACK_SIGNAL = signal.SIGUSR1
"""On this signal a child writes the stacks of its threads to stderr, even while native code holds the interpreter."""
HEARTBEAT_S = 1.0
GRACE_S = 5.0
"""From the parent's death to the forced exit: enough for a clean-up that does not need the parent."""
PR_SET_PDEATHSIG = 1


def connect_to_parent(channel_fd: int) -> socket.socket:
    """Prepare this process to be a child of `ChildProcess`. Call once, early; returns the connection to the parent."""
    # Ctrl-C in a terminal reaches the whole foreground group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    # Programs that this process starts must not keep the connection open after its end.
    os.set_inheritable(channel_fd, False)
    return socket.socket(fileno=channel_fd)


def die_with_parent(fd: int, *, grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to this process once the peer of `fd` (socket or pipe) is closed, and force the exit `grace_s` later."""
    threading.Thread(target=_watch, args=(fd, grace_s), name="parent-watch", daemon=True).start()


def _watch(fd: int, grace_s: float) -> None:
    poll = select.poll()
    # Only the end of the connection matters here: messages are read elsewhere.
    poll.register(fd, select.POLLHUP)
    while not poll.poll():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)


def kill_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for code that may hold the interpreter forever.

    A watching thread is useless there: a regular expression that backtracks without end never lets it run. Has no effect on
    systems other than Linux; the closed connection then ends every child that still reads it.
    """
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call above


def exit_quickly(code: int) -> NoReturn:
    """Exit as `sys.exit` does, but without tearing down the imported modules: with torch that takes half a second."""
    atexit._run_exitfuncs()
    with suppress(OSError):  # the reader of a pipe may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


async def heartbeat(beat: Callable[[float], None]) -> None:
    """Call `beat(loop_lag_s)` every `HEARTBEAT_S`, from the event loop: a loop that is blocked is silent."""
    loop = asyncio.get_running_loop()
    lag_s = 0.0
    while True:
        beat(lag_s)
        due = loop.time() + HEARTBEAT_S
        await asyncio.sleep(HEARTBEAT_S)
        lag_s = max(0.0, loop.time() - due)
