"""Reading parameters of requests, and writing replies."""

import math
from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.errors import RollbookError

LARGEST = 2**53 - 1


class BadRequestError(RollbookError):
    """A parameter of the request cannot be read."""


class ForbiddenError(RollbookError):
    """The request needs another role, or is not possible with this dashboard."""


class BusyError(RollbookError):
    """The same work is already being done."""


def reply(value: Any) -> web.Response:
    """NaN and infinity become null."""
    return web.Response(body=_ENCODER.encode(value), content_type="application/json")


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
        raise BadRequestError(f"{name}={text[:50]}: a whole number is expected")
    number = int(text)
    if not low <= number <= high:
        raise BadRequestError(f"{name}={number}: it must be between {low} and {high}")
    return number


def number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        raise BadRequestError(f"{name}={text[:50]}: a number is expected") from None
    if math.isnan(found):
        raise BadRequestError(f"{name}: NaN is not a number")
    return found


def choice(request: web.Request, name: str, default: str, allowed: tuple[str, ...]) -> str:
    text = request.query.get(name, "") or default
    if text not in allowed:
        raise BadRequestError(f"{name}={text[:50]}: choose one of {', '.join(allowed)}")
    return text


_ENCODER = msgspec.json.Encoder(enc_hook=str)
