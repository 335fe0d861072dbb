"""A child that ends with its parent, whatever killed the parent.

The parent keeps the write end of a pipe open and gives the read end to the child. Nobody ever writes: the read returns when the
parent is gone, also after SIGKILL, and on every Unix. The child then asks itself to stop, and after a moment insists.
"""

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
