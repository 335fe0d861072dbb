"""Who may use a dashboard: every user of this machine or, on other hosts, those who have a token.

A person enters the token once; it is exchanged for a cookie that scripts cannot read and other sites cannot send. Programs send it
as `Authorization: Bearer TOKEN`.
"""

import hmac
import secrets
import time
from enum import StrEnum
from hashlib import sha256

from aiohttp import web

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import Secret, bearer_token
from rollbook.contracts.errors import UsageError

COOKIE = "rollbook_session"
SESSION_S = 7 * 24 * 3600.0
MAX_COOKIE = 512


class PageRole(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    """May act on the run."""


class DashboardAccess:
    """`viewer` and `operator` are tokens. Without a viewer token every request may read."""

    def __init__(self, *, viewer: str | None = None, operator: str | None = None) -> None:
        self._secrets = [
            (role, Secret(token))
            for role, token in ((PageRole.OPERATOR, operator), (PageRole.VIEWER, viewer))
            if token is not None
        ]
        self.needs_token = viewer is not None
        # Sessions end with the process: the key is not stored.
        self._key = secrets.token_bytes(32)

    def role_of_token(self, token: str) -> PageRole | None:
        return next((role for role, secret in self._secrets if secret.matches(token)), None)

    def role_of(self, request: web.Request) -> PageRole | None:
        """The role of a request; None if it may not even read."""
        token = bearer_token(request.headers.get("Authorization"))
        found = self.role_of_token(token) if token else self._role_of_cookie(request.cookies.get(COOKIE, ""))
        return found or (None if self.needs_token else PageRole.VIEWER)

    def start_session(self, response: web.StreamResponse, role: PageRole, *, is_https: bool) -> None:
        until = str(int(time.time() + SESSION_S))
        response.set_cookie(
            COOKIE,
            f"{role.value}.{until}.{self._signature(role.value, until)}",
            max_age=int(SESSION_S),
            httponly=True,
            samesite="Strict",
            secure=is_https,
            path="/",
        )

    def _role_of_cookie(self, cookie: str) -> PageRole | None:
        parts = cookie[:MAX_COOKIE].split(".")
        if len(parts) != 3 or not parts[1].isascii() or not parts[1].isdecimal():
            return None
        role, until, signature = parts
        if not hmac.compare_digest(signature.encode(errors="replace"), self._signature(role, until).encode()):
            return None
        return PageRole(role) if int(until) > time.time() else None

    def _signature(self, role: str, until: str) -> str:
        return hmac.new(self._key, f"{role}.{until}".encode(errors="replace"), sha256).hexdigest()


def require_viewer_token(host: str, viewer: str | None) -> None:
    """Raises unless the host is loopback or there is a token."""
    if viewer is None and not is_loopback(host):
        raise UsageError(
            f"the dashboard would be reachable from other machines on {host} without a token: "
            "name a file with --token-file (it is created if missing), or listen on 127.0.0.1"
        )
