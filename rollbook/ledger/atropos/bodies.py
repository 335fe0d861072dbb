"""Bodies of the Atropos API: reading requests, and sending responses and errors, compressed with gzip if the client accepts it."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from aiohttp import web
from isal import isal_zlib

from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.atropos.models import InvalidBodyError, invalid_body
from rollbook.ledger.atropos.rules import UnknownEnvError
from rollbook.ledger.http.bodies import BodyReader, BodyTooLargeError, IncompleteBodyError, SlowBodyError
from rollbook.ledger.store import StoreFaultError

GZIP_WINDOW_BITS = 31
"""Makes zlib read and write gzip."""
GZIP_LEVEL = 2
"""This level is as fast as level 1 with this library, and compresses a little better."""
MIN_COMPRESSED_BYTES = 1000
FLUSH_POLL_S = 0.005
MAX_DETAILS = 100
"""Mistakes of a body that are reported. A hostile body can have one for each of its values."""


class BrowserRefusedError(RunError):
    """A browser requested a GET that changes data."""


class InvalidRunNameError(RunError):
    """The run in the path cannot exist."""


# The first match is used, so subclasses precede their base classes.
STATUSES: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (BrowserRefusedError, HTTPStatus.FORBIDDEN),
    (InvalidRunNameError, HTTPStatus.NOT_FOUND),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (SlowBodyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnknownEnvError, HTTPStatus.NOT_FOUND),
    (StoreFaultError, HTTPStatus.INSUFFICIENT_STORAGE),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RunError, HTTPStatus.CONFLICT),
)
KNOWN_ERRORS: tuple[type[Exception], ...] = (InvalidBodyError, *(kind for kind, _ in STATUSES))

_ENCODER = json.JSONEncoder(separators=(",", ":"))


async def read_body(request: web.Request, bodies: BodyReader, *, timeout_s: float) -> bytes:
    """The decompressed body. As in the original, a body whose content type is not JSON is invalid."""
    declared = request.headers.get("Content-Type")
    subtype = (declared or "application/json").partition(";")[0].strip().lower()
    if subtype != "application/json" and not subtype.endswith("+json"):
        message = f"Input should be a valid dictionary or object to extract fields from (Content-Type is {subtype!r})"
        raise invalid_body("model_attributes_type", (), message)
    body = await bodies.read_bytes(request, timeout_s=timeout_s)
    if not body and request.content_length and "gzip" in request.headers.get("Content-Encoding", "").lower():
        raise IncompleteBodyError("the gzip stream is truncated")
    return body


def accepts_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def encode_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def json_response(request: web.Request, value: Any, *, status: int = 200) -> web.Response:
    return bytes_response(request, encode_json(value), status=status)


def bytes_response(
    request: web.Request, body: bytes, *, status: int = 200, content_type: str = "application/json"
) -> web.Response:
    response = web.Response(status=status, content_type=content_type)
    if len(body) >= MIN_COMPRESSED_BYTES:
        response.headers["Vary"] = "Accept-Encoding"
        if accepts_gzip(request):
            response.headers["Content-Encoding"] = "gzip"
            body = isal_zlib.compress(body, GZIP_LEVEL, GZIP_WINDOW_BITS)
    response.body = body
    return response


def error_response(request: web.Request, error: Exception) -> web.Response:
    """One of `KNOWN_ERRORS` in the form that Atropos clients expect."""
    if isinstance(error, InvalidBodyError):
        shown = error.details[:MAX_DETAILS]
        details = [{**detail, "input": _shortened(detail.get("input"))} for detail in shown]
        return json_response(request, {"detail": details}, status=HTTPStatus.UNPROCESSABLE_ENTITY)
    if isinstance(error, IncompleteBodyError):
        return web.Response(body=b"Invalid gzip payload", content_type="text/plain", status=HTTPStatus.BAD_REQUEST)
    status = next(status for kind, status in STATUSES if isinstance(error, kind))
    response = json_response(request, {"detail": str(error)}, status=status)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    return response


def _shortened(value: Any) -> Any:
    """The invalid value, unless it is long or cannot be sent as JSON."""
    if isinstance(value, str | list | dict) and len(value) > MIN_COMPRESSED_BYTES:
        return f"a {type(value).__name__} of {len(value)} items"
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return str(value)[:200]
    return value if len(text) <= MIN_COMPRESSED_BYTES else f"{text[:200]}…"


async def deliver(request: web.Request, response: web.Response) -> web.Response:
    """Send a response now. Raises if it could not be written completely."""
    await response.prepare(request)
    await response.write_eof()
    await flushed(request)
    return response


async def flushed(request: web.Request) -> None:
    """Wait until the kernel has all bytes of the response. Raises if the client has disconnected."""
    wait_s = 0.0  # the event loop writes in its next iteration
    while True:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected before it received the response")
        if transport.get_write_buffer_size() == 0:
            return
        await asyncio.sleep(wait_s)
        wait_s = FLUSH_POLL_S
