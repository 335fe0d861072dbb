"""Errors as the dialect's clients read them: the class decides the status."""

from http import HTTPStatus

from aiohttp import web

from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.atropos.bodies import BadGzipError, Head, json_answer, refusal_answer
from rollbook.ledger.atropos.models import Refusal
from rollbook.ledger.atropos.rules import GoneStepError, UnknownEnvError
from rollbook.ledger.http.bodies import BodyTooLargeError
from rollbook.ledger.store import StoreFaultError

# First match wins, so the narrower class stands first.
STATUS_OF: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (web.HTTPRequestEntityTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (UnknownEnvError, HTTPStatus.NOT_FOUND),
    (GoneStepError, HTTPStatus.CONFLICT),
    (StoreFaultError, HTTPStatus.INSUFFICIENT_STORAGE),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RunError, HTTPStatus.CONFLICT),
)
KNOWN: tuple[type[Exception], ...] = (Refusal, BadGzipError, *(kind for kind, _ in STATUS_OF))


def error_answer(request: Head, error: Exception) -> web.Response:
    """An error of `KNOWN` in the dialect's shape."""
    if isinstance(error, Refusal):
        return refusal_answer(request, error)
    if isinstance(error, BadGzipError):
        return web.Response(body=b"Invalid gzip payload", content_type="text/plain", status=HTTPStatus.BAD_REQUEST)
    status = next(status for kind, status in STATUS_OF if isinstance(error, kind))
    answer = json_answer(request, {"detail": str(error)}, status=status)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        answer.headers["Retry-After"] = f"{retry_after_s:g}"
    return answer
