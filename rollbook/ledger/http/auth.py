"""Bearer tokens by role."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import MIN_TOKEN_LENGTH, Secret, bearer_token
from rollbook.contracts.errors import RunError


class Role(StrEnum):
    PRODUCER = "producer"
    """Opens and submits groups."""
    TRAINER = "trainer"
    """Creates runs, takes batches and acknowledges them."""
    VIEWER = "viewer"
    """Reads only."""
    OPERATOR = "operator"
    """Reads, and acts on runs: pause, drain, checkpoint, quarantine, notes. A token of a trainer allows that too."""


class UnknownTokenError(RunError):
    """The request has no token, or an unknown one."""


class WrongRoleError(RunError):
    """The token is valid, but for another role."""


class Keys:
    """The tokens of each role, and the roles whose requests need none."""

    def __init__(self, tokens: Mapping[Role, Iterable[str]], *, open_roles: frozenset[Role] = frozenset()) -> None:
        short = [role for role, known in tokens.items() for token in known if len(token) < MIN_TOKEN_LENGTH]
        if short:
            raise RunError(f"a token of the role {short[0]} has fewer than {MIN_TOKEN_LENGTH} characters")
        self._secrets = [(Secret(token), role) for role, known in tokens.items() for token in known]
        self.open_roles = open_roles

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(role for _, role in self._secrets)

    def roles_of(self, token: str) -> frozenset[Role]:
        """Takes the same time for every token: it is compared with all known tokens, even after a match."""
        return frozenset([role for secret, role in self._secrets if secret.matches(token)])

    def require(self, authorization: str | None, allowed: frozenset[Role], *, is_steering: bool = False) -> None:
        """Raise unless the `Authorization` header carries a token of one of the allowed roles, or one of them is open.

        A request that steers a run needs a token even if its role is open.
        """
        if not self._secrets or (allowed & self.open_roles and not is_steering):
            return
        token = bearer_token(authorization)
        if not token:
            raise UnknownTokenError("this request requires an access token: send 'Authorization: Bearer …'")
        roles = self.roles_of(token)
        if not roles:
            raise UnknownTokenError("the access token is unknown to this ledger")
        if not roles & allowed:
            raise WrongRoleError(
                f"the access token has the role {', '.join(sorted(roles))}; this request requires {', '.join(sorted(allowed))}"
            )


OPEN_WITHOUT_TOKEN = frozenset({Role.PRODUCER, Role.VIEWER})
"""On loopback these need no token: every process of the machine may produce groups and read. Steering a run needs one."""


def steering_keys(token: str) -> Keys:
    """One token for all requests; only those that steer a run require it."""
    return Keys({role: [token] for role in Role}, open_roles=OPEN_WITHOUT_TOKEN)


def require_tokens(host: str, keys: Keys) -> None:
    """Raises unless the host is loopback or every role but the operator has a token."""
    missing = sorted(frozenset(Role) - {Role.OPERATOR} - keys.roles)
    if missing and not is_loopback(host):
        raise RunError(
            f"the ledger would be reachable from other machines on {host} without a token for {', '.join(missing)}; "
            "set a token for each role, or listen on 127.0.0.1"
        )
