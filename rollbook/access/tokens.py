"""Tokens that clients send as `Authorization: Bearer TOKEN`, and the files that hold them.

A token is never an argument of a process and never in a log: processes of a run and clients on the same machine read it from a file
that only its owner can read.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from rollbook.access.guard import is_loopback
from rollbook.contracts.errors import RunError

MIN_TOKEN_LENGTH = 16
"""Shorter tokens can be guessed."""
MAX_TOKEN_FILE_BYTES = 4096


class TokenFileError(RunError):
    """The token file is missing, readable by other users, or has no valid token."""


class Secret:
    """A token that requests are compared with. Only its digest is kept, so that no log, dump or traceback can show it."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def matches(self, token: str) -> bool:
        """Takes the same time for every token."""
        return hmac.compare_digest(self._digest, _digest(token))


def bearer_token(authorization: str | None) -> str:
    """The token of an `Authorization` header; empty if there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def user_token_file(name: str = "token") -> Path:
    """The token file of this user, for servers that are started without a run."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "rollbook" / name


def steering_token_file(chosen: Path | None, *, host: str, has_others: bool) -> Path | None:
    """The token file of a server without a run: the chosen one or, on loopback, this user's unless other tokens are set."""
    if chosen is None and is_loopback(host) and not has_others:
        return user_token_file()
    return chosen


def read_token(path: Path) -> str:
    """Raises `TokenFileError` unless the file belongs to this user or root and no other user can read it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_TOKEN_FILE_BYTES)
    except OSError as error:
        raise TokenFileError(f"the token file {path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise TokenFileError(f"the token file {path} is not a file of this user; delete it, or name another file")
    if status.st_mode & 0o077:
        raise TokenFileError(f"other users can read the token file {path}; run: chmod 600 {path}")
    token = content.decode("ascii", errors="replace").strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"the token file {path} must hold one token of at least {MIN_TOKEN_LENGTH} printable ASCII characters; "
            "delete it to get a new one"
        )
    return token


def read_or_create_token(path: Path) -> str:
    """The token in a file. A missing file is created with a new token and mode 0600; of several creators one wins."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        except OSError as error:
            raise TokenFileError(f"the token file {path} cannot be written: {error.strerror or error}") from error
    return read_token(path)


def write_token(path: Path, token: str) -> None:
    """Write a token that another process sent. Only the owner of the file can read it."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
