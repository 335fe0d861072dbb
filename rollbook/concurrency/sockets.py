"""Listening sockets: opened before a server is ready, so that early clients wait in the backlog and are not refused."""

import socket

BACKLOG = 4096
"""Connections that may wait while a server starts or restarts: more than the concurrent episodes of a run."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 lets the kernel choose. Raises `OSError` if the address cannot be used."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
    except OSError:
        sock.close()
        raise
    sock.listen(BACKLOG)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
