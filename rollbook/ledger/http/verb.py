"""What a verb of the ledger's HTTP API is: a request struct with the route, the roles and the response type in its declaration.

`verbs.py` declares every verb once. The server's routes, the OpenAPI document, docs/http-api.md and `LedgerClient.call` are derived
from the declarations.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar, get_args

from rollbook.ledger.http.auth import Role
from rollbook.ledger.http.wire import Message

R_co = TypeVar("R_co", covariant=True)


class Form(StrEnum):
    """The format of a response."""

    MESSAGE = "message"
    """MessagePack or JSON, as the request's `Accept` header says."""
    FRAMES = "frames"
    """A message as MessagePack, then payloads; each is preceded by its length (8 bytes, big-endian)."""
    FRAME = "frame"
    """One payload, as it is stored."""
    EVENTS = "events"
    """Server-sent events."""
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A verb as the server, the client and the documentation read it."""

    name: str
    """The name of the struct in snake case: the label of its metrics, and its operation id."""
    method: str
    path: str
    """`{run}` is the run of the client. Another name in braces is a field of the struct, only for GET."""
    summary: str
    roles: frozenset[Role] | None
    """Roles that may call it; None: no token is required."""
    request: type[Message]
    """The body of a POST or PUT; the query parameters of a GET."""
    response: Any
    form: Form
    is_steering: bool
    """It can end a run, so it needs a token even where its role needs none."""
    takes_s: float
    """How long the client waits for the response, in addition to the time of any request."""

    @property
    def has_body(self) -> bool:
        return self.method != "GET"

    @property
    def path_fields(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)


class Verb(Message, Generic[R_co], frozen=True):
    """Base of all requests. The parameter is the type of the response."""

    declaration: ClassVar[Declaration]


V = TypeVar("V", bound=Verb[Any])


def verb(
    route: str,
    roles: frozenset[Role] | None,
    *,
    form: Form = Form.MESSAGE,
    is_steering: bool = False,
    takes_s: float = 0.0,
) -> Callable[[type[V]], type[V]]:
    """Declare a verb: its route, such as `GET /health`, and who may call it. The docstring of the struct documents it."""
    method, path = route.split(" ")

    def declare(request: type[V]) -> type[V]:
        [base] = request.__orig_bases__  # type: ignore[attr-defined]
        request.declaration = Declaration(
            name=re.sub(r"(?<!^)(?=[A-Z])", "_", request.__name__).lower(),
            method=method,
            path=path,
            summary=" ".join(inspect.cleandoc(request.__doc__ or "").split()),
            roles=roles,
            request=request,
            response=get_args(base)[0],
            form=form,
            is_steering=is_steering,
            takes_s=takes_s,
        )
        return request

    return declare
