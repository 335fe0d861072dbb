"""A child that ends with its parent, whatever killed the parent.

The parent keeps the write end of a pipe open and gives the read end to the child. Nobody ever writes: the read returns when the
parent is gone, also after SIGKILL, and on every Unix. The child then asks itself to stop, and after a moment insists.
"""

import ctypes
import os
import signal
import threading
import time

GRACE_S = 5.0
"""From the parent's death to the forced end: enough for a clean-up that does not need the parent."""


def die_with_parent(read_fd: int, *, grace_s: float = GRACE_S) -> None:
    """Start watching. Call once, early, in the child."""
    threading.Thread(target=_watch, args=(read_fd, grace_s), name="parent-watch", daemon=True).start()


def _watch(read_fd: int, grace_s: float) -> None:
    try:
        while os.read(read_fd, 1):
            pass
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)


PR_SET_PDEATHSIG = 1


def killed_with_parent() -> None:
    """Be killed by the kernel when the parent ends. For processes whose foreign code may hold the interpreter for ever.

    A thread cannot watch there: a regular expression that backtracks without end never lets it run. Where the kernel has no such
    call (it is Linux's own) nothing happens; the parent's end then closes the connection, which ends all but the endless ones.
    """
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It died between the fork and the call above.
        os._exit(1)
