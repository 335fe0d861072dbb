"""Bodies of the dialect: what comes in, perhaps compressed, and what goes out, compressed if asked for."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from isal import isal_zlib

from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos.desk import AtroposDesk
from rollbook.ledger.atropos.models import Refusal, refusal

GZIP = 31
"""Window bits that make zlib read and write gzip."""
LEVEL = 2
"""Costs as much as 1 with this library and gives a little less to send."""
SMALLEST_COMPRESSED = 1000
GROUPS_IN_ONE_READ = 8
"""Bounds what one trainer keeps in the service's memory."""
LARGE = 1 << 20
"""A group larger than this is compressed in a thread: others must not wait for it."""
FLUSH_POLL_S = 0.005
OPENING, CLOSING = b'{"batch":[', b"]}"


class BadGzipError(Exception):
    """The body says that it is gzip and is not."""


class TooLargeError(Exception):
    """The body is larger than allowed, unpacked."""


async def read_body(request: web.Request, *, max_bytes: int, within_s: float) -> bytes:
    """The body, unpacked by aiohttp while it comes in; the limit is on what comes out."""
    parts, total = [], 0
    try:
        async with asyncio.timeout(within_s):
            while part := await request.content.readany():
                total += len(part)
                if total > max_bytes:
                    raise TooLargeError(f"the body is larger than {max_bytes} bytes, unpacked")
                parts.append(part)
    except web.RequestPayloadError as error:
        raise BadGzipError(str(error)) from error
    except TimeoutError as error:
        raise TransientError(f"the body did not arrive within {within_s:g} s; send it again") from error
    if not parts and request.content_length and "gzip" in request.headers.get("Content-Encoding", "").lower():
        raise BadGzipError("it ends before it begins")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def require_json_type(request: web.Request) -> None:
    """As the original: a body of another declared type is taken for no object at all."""
    declared = request.headers.get("Content-Type")
    subtype = (declared or "application/json").partition(";")[0].strip().lower()
    if subtype != "application/json" and not subtype.endswith("+json"):
        message = f"Input should be a valid dictionary or object to extract fields from (Content-Type is {subtype!r})"
        raise refusal("model_attributes_type", (), message)


def accepts_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def json_answer(request: web.Request, answer: Any, *, status: int = 200) -> web.Response:
    return body_answer(request, json.dumps(answer, separators=(",", ":")).encode(), status=status)


def body_answer(
    request: web.Request, body: bytes, *, status: int = 200, content_type: str = "application/json"
) -> web.Response:
    answer = web.Response(status=status, content_type=content_type)
    if len(body) >= SMALLEST_COMPRESSED:
        answer.headers["Vary"] = "Accept-Encoding"
        if accepts_gzip(request):
            answer.headers["Content-Encoding"] = "gzip"
            body = isal_zlib.compress(body, LEVEL, GZIP)
    answer.body = body
    return answer


def refusal_answer(request: web.Request, error: Refusal) -> web.Response:
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
    await _flushed(request)
    return answer


async def deliver_batch(request: web.Request, desk: AtroposDesk, ids: Sequence[GroupId]) -> web.StreamResponse:
    """Send a batch, a few groups at a time. Raises when it could not be written to its end."""
    answer = web.StreamResponse(headers={"Content-Type": "application/json", "Vary": "Accept-Encoding"})
    packer = None
    if accepts_gzip(request):
        answer.headers["Content-Encoding"] = "gzip"
        packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP)
    try:
        async with asyncio.timeout(desk.config.serve_s):
            await answer.prepare(request)
            before = OPENING
            for start in range(0, len(ids), GROUPS_IN_ONE_READ):
                for payload in await desk.payloads(list(ids[start : start + GROUPS_IN_ONE_READ])):
                    await _send(answer, before, payload, packer)
                    before = b","
            await _send(answer, b"", CLOSING, packer)
            if packer is not None:
                await answer.write(packer.flush())
            await answer.write_eof()
            await _flushed(request)
    except TimeoutError:
        _cut(request)
        raise
    except asyncio.CancelledError:
        raise
    except Exception:
        # Half a body must not look like a whole one.
        _cut(request)
        raise
    return answer


async def _send(answer: web.StreamResponse, before: bytes, payload: bytes, packer: Any) -> None:
    if packer is None:
        if before:
            await answer.write(before)
        await answer.write(payload)
    elif len(payload) > LARGE:
        await answer.write(await asyncio.to_thread(packer.compress, before + payload))
    else:
        packed = packer.compress(before + payload)
        if packed:
            await answer.write(packed)


async def _flushed(request: web.Request) -> None:
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


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
