"""Connections between rank 0 and the other ranks: calls go out, heartbeats go both ways.

A rank that is killed closes its connection at once; one whose machine or network is lost is silent. Both end the process that
notices it, because a collective would wait for the lost rank for minutes. The run then resumes from its last checkpoint.

Both ends prove that they know the token of the invitation before either accepts a frame: the file may outlive rank 0, and another
program may then listen on its port. The token itself is never sent. A rank sends a nonce and its proof first, so a stranger that
connects to rank 0 gets no byte.
"""

import errno
import fcntl
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.concurrency.sockets import listening_socket

BEAT_S = 1.0
SILENCE_S = 15
"""After this time without a heartbeat a rank is lost. The leases of members have the same length."""
HELLO_S = 10.0
MAX_UNKNOWN = 64
"""Connections that have not sent the token yet. Others are closed at once, so that a flood of them costs few threads."""
ACCEPT_PAUSE_S = 0.1
COLLECTIVE_FAILS_S = 3.0
"""A collective usually notices a killed rank itself, with a better message than this module has."""
BEAT = b""
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HELLO, LEADER, FOLLOWER = b"rollbook rank: hello", b"rollbook rank: leader", b"rollbook rank: follower"
"""What each proof is about, so that none can be used as another."""
SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """How a rank reaches rank 0: the contents of a file that only the owner of the run can read."""

    host: str
    port: int
    token: str

    def write(self, path: Path) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)  # of another process with this number
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Invitation | None":
        """None if rank 0 invites no one now."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        return None


class FalsePeerError(ConnectionError):
    """The other end does not know the token of the invitation."""


class Link:
    """One end of a connection. `on_lost` is called in a thread, once, when the other end is gone or silent."""

    def __init__(
        self,
        sock: socket.socket,
        on_lost: Callable[[str], None],
        *,
        on_message: Callable[[bytes], None] | None = None,
        silence_s: int = SILENCE_S,
    ) -> None:
        """`on_message`: called in a thread with each message. None: `receive` returns them."""
        self._silence_s = silence_s
        sock.setblocking(True)
        # Limits the wait for data, not the time that a large message may take.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", silence_s, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = BlockingFrames(sock)
        self._sock = sock
        self._on_lost = on_lost
        self._is_closed = False
        # At most a few calls: rank 0 waits for the result of each step.
        self._received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._on_message = on_message or self._received.put
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, payload: bytes) -> None:
        """Raises `OSError` when the other end is gone."""
        self._frames.send(payload)

    def send_last(self, payload: bytes) -> None:
        """After this message the other end may close the connection."""
        self._is_closed = True
        self._frames.send(payload)

    def receive(self) -> bytes:
        return self._received.get()

    def wait_closed(self, within_s: float) -> None:
        """Wait until the other end has closed the connection."""
        self._receiver.join(within_s)

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._frames.close()

    def _receive(self) -> None:
        cause = "closed its connection"
        try:
            while (payload := self._frames.receive()) is not None:
                if payload != BEAT:
                    self._on_message(payload)
        except BlockingIOError:
            cause = f"sent no heartbeat for {self._silence_s} s"
        except OSError as error:
            cause = f"is unreachable ({error})"
        if not self._is_closed:
            self._on_lost(cause)

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._is_closed:
                self._frames.send(BEAT)
                time.sleep(BEAT_S)


class RankListener:
    """Accepts ranks that prove that they know the token of the invitation. Others get no response."""

    def __init__(self, host: str, invitation_file: Path) -> None:
        self._socket = listening_socket(host, 0)
        self._token = secrets.token_hex(32)
        self._file = invitation_file
        self._joined: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._unknown = threading.BoundedSemaphore(MAX_UNKNOWN)
        Invitation(host=host, port=self._socket.getsockname()[1], token=self._token).write(invitation_file)
        threading.Thread(target=self._accept, daemon=True).start()

    def joined(self, wait_s: float) -> socket.socket | None:
        """The next rank; None if none joined in this time."""
        with suppress(queue.Empty):
            return self._joined.get(timeout=wait_s)
        return None

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):  # closed
                    return
                time.sleep(ACCEPT_PAUSE_S)  # too many open files, or the client is gone
                continue
            if self._unknown.acquire(blocking=False):
                threading.Thread(target=self._greet, args=[sock], daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            _prove_leader(sock, self._token)
            self._joined.put(sock)
        except OSError:
            sock.close()
        finally:
            self._unknown.release()


def connect(invitation: Invitation, on_lost: Callable[[str], None]) -> Link:
    """Join the team of rank 0. Raises `OSError` if it cannot be reached, `FalsePeerError` if another program has its port."""
    sock = socket.create_connection((invitation.host, invitation.port), timeout=HELLO_S)
    try:
        _prove_follower(sock, invitation.token)
    except FalsePeerError as error:
        sock.close()
        raise FalsePeerError(
            f"the program at {invitation.host}:{invitation.port} is not rank 0: {error}. It gets nothing"
        ) from error
    except BaseException:
        sock.close()
        raise
    return Link(sock, on_lost)


def _proof(token: str, about: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), about + b"".join(nonces), "sha256")


def _prove_follower(sock: socket.socket, token: str) -> None:
    until, own = time.monotonic() + HELLO_S, secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own + _proof(token, HELLO, own))
    theirs, proof = _receive_proof(sock, until, has_nonce=True)
    _require(proof, _proof(token, LEADER, own, theirs))
    sock.sendall(_proof(token, FOLLOWER, own, theirs))


def _prove_leader(sock: socket.socket, token: str) -> None:
    until, own = time.monotonic() + HELLO_S, secrets.token_bytes(NONCE_BYTES)
    theirs, proof = _receive_proof(sock, until, has_nonce=True)
    _require(proof, _proof(token, HELLO, theirs))
    sock.sendall(own + _proof(token, LEADER, theirs, own))
    _, proof = _receive_proof(sock, until, has_nonce=False)
    # A new nonce in every greeting: a recorded one does not help.
    _require(proof, _proof(token, FOLLOWER, theirs, own))


def _require(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise FalsePeerError("it does not know the token of the invitation")


def _receive_proof(sock: socket.socket, until: float, *, has_nonce: bool) -> tuple[bytes, bytes]:
    """A nonce, if there is one, and a proof."""
    split = NONCE_BYTES if has_nonce else 0
    found = b""
    while (missing := split + PROOF_BYTES - len(found)) > 0:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise FalsePeerError(f"it sent no proof within {HELLO_S:g} s")
        sock.settimeout(left_s)
        try:
            part = sock.recv(missing)
        except TimeoutError as error:
            raise FalsePeerError(f"it sent no proof within {HELLO_S:g} s") from error
        if not part:
            raise FalsePeerError("it closed the connection instead of a proof")
        found += part
    return found[:split], found[split:]


def end_process(cause: str) -> None:
    """End this process, which may be in a collective that cannot be interrupted. It has nothing to save."""
    time.sleep(COLLECTIVE_FAILS_S)
    sys.stderr.write(f"{cause}: this rank ends, and the run resumes from its last checkpoint\n")
    sys.stderr.flush()
    os._exit(1)


def interface_of(host: str) -> str | None:
    """The network interface that has an address, for gloo and NCCL; None: unknown."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
            request = struct.pack("256s", name.encode()[:15])
            address = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24]
            if socket.inet_ntoa(address) == host:
                return name
    return None
