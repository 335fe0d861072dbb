"""Errors as answers: the class of an error decides the status, its text says what to do."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import UnknownTokenError, WrongRoleError
from rollbook.ledger.http.bodies import BodyTooLargeError, SlowBodyError, TornBodyError, UnreadableBodyError
from rollbook.ledger.rules.groups import QueueFullError
from rollbook.ledger.rules.run_transaction import UnknownRunError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.tools.explain import UnknownGroupError


class NotFoundError(RunError):
    """There is nothing of that name."""


# First match wins, so the narrower class stands first.
STATUS_OF: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (FencedError, HTTPStatus.CONFLICT),
    (UnknownTokenError, HTTPStatus.UNAUTHORIZED),
    (WrongRoleError, HTTPStatus.FORBIDDEN),
    (UnknownRunError, HTTPStatus.NOT_FOUND),
    (UnknownGroupError, HTTPStatus.NOT_FOUND),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (TornBodyError, HTTPStatus.BAD_REQUEST),
    (SlowBodyError, HTTPStatus.REQUEST_TIMEOUT),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (UnreadableBodyError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (StoreFaultError, HTTPStatus.INSUFFICIENT_STORAGE),
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RunError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.ValidationError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.DecodeError, HTTPStatus.BAD_REQUEST),
    # Text that claims to be UTF-8 and is not.
    (UnicodeDecodeError, HTTPStatus.BAD_REQUEST),
    # A message nested deeper than anything this dialect has.
    (RecursionError, HTTPStatus.BAD_REQUEST),
)
KNOWN = tuple(kind for kind, _ in STATUS_OF)


def status_of(error: Exception) -> HTTPStatus:
    return next(status for kind, status in STATUS_OF if isinstance(error, kind))


def refusal(error: Exception) -> web.Response:
    """The answer to a call that failed with one of `KNOWN`: readable for people with curl, structured for clients."""
    status = status_of(error)
    body = msgspec.json.encode(wire.ErrorReply(kind=type(error).__name__, message=str(error)))
    response = web.Response(status=status, body=body, content_type=wire.JSON_CONTENT_TYPE)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    if status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        # What is still to come of the body is not waited for.
        response.force_close()
    return response
