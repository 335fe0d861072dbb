"""Bodies of the dialect: what comes in, perhaps compressed, and what goes out, compressed if asked for."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web
from isal import isal_zlib
from isal.igzip_lib import IsalError

from rollbook.contracts.errors import TransientError
from rollbook.ledger.atropos.models import Refusal, refusal
from rollbook.ledger.http.bodies import BodyReader, BodyTooLargeError

GZIP = 31
"""Window bits that make zlib read and write gzip."""
LEVEL = 2
"""Costs as much as 1 with this library and gives a little less to send."""
SMALLEST_COMPRESSED = 1000
FLUSH_POLL_S = 0.005
MOST_EXPANSION = 1_032
"""Deflate makes at most this many bytes of one."""
USUAL_EXPANSION = 16


_ENCODER = json.JSONEncoder(separators=(",", ":"))


class BadGzipError(Exception):
    """The body says that it is gzip and is not."""


class Head(Protocol):
    """What answers need to know of a request."""

    @property
    def headers(self) -> Mapping[str, str]: ...


async def read_body(request: web.Request, *, bodies: BodyReader, within_s: float) -> bytes:
    """The body, unpacked by aiohttp while it comes in; the limit is on what comes out, and on all bodies under way together."""
    try:
        async with asyncio.timeout(within_s):
            whole = await bodies.collect(request.content, request.content_length or 0)
    except web.RequestPayloadError as error:
        raise BadGzipError(str(error)) from error
    except TimeoutError as error:
        raise TransientError(f"the body did not arrive within {within_s:g} s; send it again") from error
    if not whole and request.content_length and "gzip" in request.headers.get("Content-Encoding", "").lower():
        raise BadGzipError("it ends before it begins")
    return whole


def unpacked_size(packed: memoryview) -> int:
    """What a gzip body says of itself, in its last bytes. It may be wrong."""
    return int.from_bytes(packed[-4:], "little")


def unpack(packed: memoryview, *, at_most: int) -> bytes:
    """A gzip body in one go, never to more than `at_most` bytes."""
    if not packed:
        return b""
    try:
        if len(packed) * MOST_EXPANSION <= at_most:
            # It cannot grow beyond the limit. Its last bytes tell how long it is, as a hint: room at once costs half as much.
            return isal_zlib.decompress(packed, GZIP, min(unpacked_size(packed) + 1, USUAL_EXPANSION * len(packed)))
        unpacker = isal_zlib.decompressobj(GZIP)
        whole = unpacker.decompress(packed, at_most + 1)
    except IsalError as error:  # type: ignore[misc]  # a class, which the stubs take for a value
        raise BadGzipError(str(error)) from error
    if len(whole) > at_most:
        raise BodyTooLargeError(f"the body has {len(whole)} bytes or more, unpacked; at most {at_most} are taken")
    if not unpacker.eof:
        raise BadGzipError("it breaks off")
    return whole


def require_json_type(request: web.Request) -> None:
    """As the original: a body of another declared type is taken for no object at all."""
    declared = request.headers.get("Content-Type")
    subtype = (declared or "application/json").partition(";")[0].strip().lower()
    if subtype != "application/json" and not subtype.endswith("+json"):
        message = f"Input should be a valid dictionary or object to extract fields from (Content-Type is {subtype!r})"
        raise refusal("model_attributes_type", (), message)


def accepts_gzip(request: Head) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def json_answer(request: Head, answer: Any, *, status: int = 200) -> web.Response:
    return body_answer(request, encode_json(answer), status=status)


def encode_json(answer: Any) -> bytes:
    return _ENCODER.encode(answer).encode()


def body_answer(
    request: Head, body: bytes, *, status: int = 200, content_type: str = "application/json"
) -> web.Response:
    answer = web.Response(status=status, content_type=content_type)
    if len(body) >= SMALLEST_COMPRESSED:
        answer.headers["Vary"] = "Accept-Encoding"
        if accepts_gzip(request):
            answer.headers["Content-Encoding"] = "gzip"
            body = isal_zlib.compress(body, LEVEL, GZIP)
    answer.body = body
    return answer


def refusal_answer(request: Head, error: Refusal) -> web.Response:
    details = [{**detail, "input": _short(detail.get("input"))} for detail in error.details]
    return json_answer(request, {"detail": details}, status=422)


def _short(value: Any) -> Any:
    """What was wrong, unless it is half the body, or nothing that JSON can say."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return str(value)[:200]
    return value if len(text) <= SMALLEST_COMPRESSED else f"{text[:200]}…"


async def deliver(request: web.Request, answer: web.Response) -> web.Response:
    """Send an answer now. Raises when it could not be written to its end."""
    await answer.prepare(request)
    await answer.write_eof()
    await flushed(request)
    return answer


async def flushed(request: web.Request) -> None:
    """Everything is in the hands of the kernel, and the client is still there."""
    wait_s = 0.0  # the event loop writes what it was given when it comes round
    while True:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client went away before it had its answer")
        if transport.get_write_buffer_size() == 0:
            return
        await asyncio.sleep(wait_s)
        wait_s = FLUSH_POLL_S
