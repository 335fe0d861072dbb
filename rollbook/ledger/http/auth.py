"""Who may do what: bearer tokens by role. Without keys every door is open, which is for loopback only."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from enum import StrEnum

from rollbook.contracts.errors import RunError

SHORTEST_TOKEN = 16
"""Shorter ones can be guessed."""


class Role(StrEnum):
    PRODUCER = "producer"
    """Opens and submits groups."""
    TRAINER = "trainer"
    """Takes batches and acknowledges them, and creates runs."""
    VIEWER = "viewer"
    """Looks, and changes nothing."""


class UnknownTokenError(RunError):
    """No token, or one that nobody was given."""


class WrongRoleError(RunError):
    """The token is good, for something else."""


class Keys:
    """The tokens of each role. Only their digests are kept, so that no log, dump or traceback can show one."""

    def __init__(self, tokens: Mapping[Role, Iterable[str]]) -> None:
        self._digests = [(_digest(token), role) for role, known in tokens.items() for token in known]
        short = [role for role, known in tokens.items() for token in known if len(token) < SHORTEST_TOKEN]
        if short:
            raise RunError(
                f"a token of the role {short[0]} has fewer than {SHORTEST_TOKEN} characters; make a longer one"
            )

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(role for _, role in self._digests)

    def roles_of(self, token: str) -> frozenset[Role]:
        """Takes the same time for every token: each known one is compared, and none is left out after a hit."""
        asked = _digest(token)
        return frozenset(role for known, role in self._digests if hmac.compare_digest(known, asked))

    def require(self, authorization: str | None, allowed: frozenset[Role]) -> None:
        """Raise unless the `Authorization` header carries a token of one of the allowed roles."""
        if not self._digests:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnknownTokenError("this ledger asks for a token: send 'Authorization: Bearer …'")
        roles = self.roles_of(token.strip())
        if not roles:
            raise UnknownTokenError("the token is not known to this ledger")
        if not roles & allowed:
            raise WrongRoleError(
                f"the token is for the role {', '.join(sorted(roles))}; this call is for {', '.join(sorted(allowed))}"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_open_doors(host: str, keys: Keys) -> None:
    """Off loopback each role needs a token of its own."""
    missing = sorted(frozenset(Role) - keys.roles)
    if missing and not is_loopback(host):
        raise RunError(
            f"the ledger would be reachable by others on {host}, and there is no token for {', '.join(missing)}; "
            "set one for each role, or listen on 127.0.0.1"
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
