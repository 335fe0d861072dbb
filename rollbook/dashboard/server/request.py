"""Reading parameters of requests, and writing replies."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RollbookError

T = TypeVar("T")
LARGEST = 2**53 - 1
SHARED_S = 1.0
"""For this time a reply is sent again to other pages that request it."""
MAX_SHARED = 32


class BadPageRequestError(RollbookError):
    """A parameter of the request cannot be read."""


class ForbiddenError(RollbookError):
    """The request needs another role, or is not possible with this dashboard."""


class BusyError(RollbookError):
    """The same work is already being done."""


class SharedReplies:
    """Computes a reply once for all pages that request it at about the same time, so that many open pages cost as much as one."""

    def __init__(self) -> None:
        self._replies: dict[str, tuple[float, bytes]] = {}
        """By address: when it was computed, and its body."""
        self._computing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changes = 0

    async def reply(self, address: str, compute: Callable[[], Awaitable[Any]]) -> web.Response:
        lock = self._computing.setdefault(address, asyncio.Lock())
        async with lock:
            at, body = self._replies.get(address, (-math.inf, b""))
            if time.monotonic() - at >= SHARED_S:
                changes = self._changes
                body = _ENCODER.encode(await compute())
                if changes == self._changes:
                    self._replies.pop(address, None)
                    self._replies[address] = (time.monotonic(), body)
                    if len(self._replies) > MAX_SHARED:
                        del self._replies[next(iter(self._replies))]
        return _json(body)

    def clear(self) -> None:
        """A run has changed: the next replies show it."""
        self._changes += 1
        self._replies.clear()

    @web.middleware
    async def clear_after_post(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            if request.method == "POST":
                self.clear()


def reply(value: Any) -> web.Response:
    """NaN and infinity become null."""
    return _json(_ENCODER.encode(value))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def error_reply(status: int, kind: str, message: str) -> web.Response:
    # A message may quote what a client sent.
    text = message.encode(errors="replace").decode()
    response = reply({"error": {"type": kind, "message": text}})
    response.set_status(status)
    return response


def whole_number(request: web.Request, name: str, default: int, *, low: int = 0, high: int = LARGEST) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    return checked_number(name, text, low=low, high=high)


def checked_number(name: str, text: str, *, low: int = 0, high: int = LARGEST) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(text) > 20:
        raise BadPageRequestError(f"{name}={text[:50]}: a whole number is expected")
    number = int(text)
    if not low <= number <= high:
        raise BadPageRequestError(f"{name}={number}: it must be between {low} and {high}")
    return number


def number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        raise BadPageRequestError(f"{name}={text[:50]}: a number is expected") from None
    if math.isnan(found):
        raise BadPageRequestError(f"{name}: NaN is not a number")
    return found


def choice(request: web.Request, name: str, default: str, allowed: tuple[str, ...]) -> str:
    text = request.query.get(name, "") or default
    if text not in allowed:
        raise BadPageRequestError(f"{name}={text[:50]}: choose one of {', '.join(allowed)}")
    return text


async def read_body(request: web.Request, kind: type[T]) -> T:
    try:
        return json_decoder(kind).decode_body(await request.read())
    except msgspec.MsgspecError as error:
        raise BadPageRequestError(f"the body cannot be read: {error}") from None


_ENCODER = msgspec.json.Encoder(enc_hook=str)
