"""Bearer tokens by role. Without keys every request is allowed, which is safe on loopback only."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from enum import StrEnum

from rollbook.contracts.errors import RunError

MIN_TOKEN_LENGTH = 16
"""Shorter tokens can be guessed."""


class Role(StrEnum):
    PRODUCER = "producer"
    """Opens and submits groups."""
    TRAINER = "trainer"
    """Creates runs, takes batches and acknowledges them."""
    VIEWER = "viewer"
    """Reads only."""


class UnknownTokenError(RunError):
    """The request has no token, or an unknown one."""


class WrongRoleError(RunError):
    """The token is valid, but for another role."""


class Keys:
    """The tokens of each role. Only their digests are kept, so that no log, dump or traceback can show a token."""

    def __init__(self, tokens: Mapping[Role, Iterable[str]]) -> None:
        self._digests = [(_digest(token), role) for role, known in tokens.items() for token in known]
        short = [role for role, known in tokens.items() for token in known if len(token) < MIN_TOKEN_LENGTH]
        if short:
            raise RunError(f"a token of the role {short[0]} has fewer than {MIN_TOKEN_LENGTH} characters")

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(role for _, role in self._digests)

    def roles_of(self, token: str) -> frozenset[Role]:
        """Takes the same time for every token: it is compared with all known tokens, also after a match."""
        digest = _digest(token)
        return frozenset(role for known, role in self._digests if hmac.compare_digest(known, digest))

    def require(self, authorization: str | None, allowed: frozenset[Role]) -> None:
        """Raise unless the `Authorization` header carries a token of one of the allowed roles."""
        if not self._digests:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnknownTokenError("this ledger requires a token: send 'Authorization: Bearer …'")
        roles = self.roles_of(token.strip())
        if not roles:
            raise UnknownTokenError("the token is unknown to this ledger")
        if not roles & allowed:
            raise WrongRoleError(
                f"the token has the role {', '.join(sorted(roles))}; this request requires {', '.join(sorted(allowed))}"
            )


def is_loopback(host: str) -> bool:
    """Whether a server on this host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_tokens(host: str, keys: Keys) -> None:
    """Raises unless the host is loopback or every role has a token."""
    missing = sorted(frozenset(Role) - keys.roles)
    if missing and not is_loopback(host):
        raise RunError(
            f"the ledger would be reachable from other machines on {host} without a token for {', '.join(missing)}; "
            "set a token for each role, or listen on 127.0.0.1"
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
