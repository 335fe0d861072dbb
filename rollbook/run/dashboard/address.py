"""The address of a dashboard. Imports nothing of the dashboard, for the process that only starts it."""

import socket

from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import UsageError

DEFAULT_PORT = 8686
"""The same each time, so that a bookmark works. If it is in use, the kernel chooses another one."""


def open_socket(host: str, port: int | None) -> socket.socket:
    """The chosen port; without one, the usual port or, if that is in use, any free one."""
    try:
        return listening_socket(host, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is None:
            return listening_socket(host, 0)
        raise UsageError(
            f"the dashboard cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
        ) from error
