"""Errors as HTTP responses: the class of an error determines the status."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from rollbook.contracts.errors import FencedError, NotFoundError, RunError, TransientError
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import UnknownTokenError, WrongRoleError
from rollbook.ledger.http.bodies import BodyTooLargeError, IncompleteBodyError, SlowBodyError, UnsupportedBodyError
from rollbook.ledger.http.relay import RelayFullError
from rollbook.ledger.rules.groups import QueueFullError
from rollbook.ledger.rules.run_transaction import UnknownRunError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.tools.explain import UnknownGroupError


class RefusedClientError(RunError):
    """The request comes from a page in a browser, or names another host."""


# The first match is used, so subclasses precede their base classes.
STATUSES: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (FencedError, HTTPStatus.CONFLICT),
    (UnknownTokenError, HTTPStatus.UNAUTHORIZED),
    (WrongRoleError, HTTPStatus.FORBIDDEN),
    (RefusedClientError, HTTPStatus.FORBIDDEN),
    (UnknownRunError, HTTPStatus.NOT_FOUND),
    (UnknownGroupError, HTTPStatus.NOT_FOUND),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (IncompleteBodyError, HTTPStatus.BAD_REQUEST),
    (SlowBodyError, HTTPStatus.REQUEST_TIMEOUT),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (UnsupportedBodyError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (StoreFaultError, HTTPStatus.INSUFFICIENT_STORAGE),
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS),
    (RelayFullError, HTTPStatus.TOO_MANY_REQUESTS),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RunError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.ValidationError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.DecodeError, HTTPStatus.BAD_REQUEST),
    # Text that is not valid UTF-8.
    (UnicodeDecodeError, HTTPStatus.BAD_REQUEST),
    # A message nested too deeply.
    (RecursionError, HTTPStatus.BAD_REQUEST),
)
KNOWN_ERRORS = tuple(kind for kind, _ in STATUSES)


def status_of(error: Exception) -> HTTPStatus:
    return next(status for kind, status in STATUSES if isinstance(error, kind))


def error_response(error: Exception) -> web.Response:
    """The response to a request that failed with one of `KNOWN_ERRORS`."""
    status = status_of(error)
    body = msgspec.json.encode(wire.ErrorReply(kind=type(error).__name__, message=str(error)))
    response = web.Response(status=status, body=body, content_type=wire.JSON_CONTENT_TYPE)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    if status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        response.force_close()  # do not wait for the rest of the body
    return response
