"""The busiest requests, read without a framework: a group that is submitted or posted, thousands of times for one of any other.

A connection looks at the beginning of each request. One that is plainly a POST to a hot route, with a length and nothing odd, is
read and answered here; everything else, whatever is odd about it, goes to aiohttp as it came. So there is nothing this module must
refuse by itself except a body that does not arrive in time, and the bounds are the same: size, memory of bodies under way, time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.web_protocol import RequestHandler

from rollbook.contracts.errors import TransientError
from rollbook.ledger.http.bodies import BodyReader, SlowBodyError

LONGEST_HEAD = 4_096
"""Heads of hot requests are a tenth of it."""
LONGEST_PLAIN_NAME = 128
MOST_AHEAD = 262_144
"""Bytes of later requests that a client may send before it has its answer; then it is not read any further."""
FLUSH_POLL_S = 0.005
LENGTH = b"\r\nContent-Length: "
MOST_DIGITS = 12
MOST_SEEN = 256
"""Kinds of heads that are remembered."""
KNOWN_HEADERS = frozenset(
    {b"host", b"accept", b"accept-encoding", b"user-agent", b"content-type", b"content-length", b"content-encoding"}
    | {b"authorization", b"connection"}
)
"""A head with any other may want something that only aiohttp knows."""
_PHRASES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The head of a hot request."""

    route: "HotRoute"
    run: str
    headers: Mapping[bytes, bytes]
    begin: int
    """Where its body begins in the bytes that brought the head."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotReply:
    body: bytes
    content_type: str
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    closes: bool = False

    @classmethod
    def of(cls, response: web.Response) -> "HotReply":
        """A refusal, as aiohttp would have sent it."""
        headers = {name: value for name, value in response.headers.items() if name != "Content-Type"}
        body = response.body
        assert isinstance(body, bytes)
        return cls(
            body=body,
            content_type=response.headers["Content-Type"],
            status=response.status,
            headers=headers,
            closes=response.keep_alive is False,
        )

    def encoded(self) -> bytes:
        more = ""
        if self.headers or self.closes:
            more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            more += "Connection: close\r\n" if self.closes else ""
        return b"%bContent-Type: %b\r\nContent-Length: %d\r\nDate: %b\r\n%b\r\n%b" % (
            _PHRASES[self.status],
            self.content_type.encode(),
            len(self.body),
            rfc822_formatted_time().encode(),
            more.encode(),
            self.body,
        )


class HotAnswer(Protocol):
    """Reads the body, sends one reply. Raises nothing that it could have answered."""

    def __call__(self, asked: Asked, body: memoryview, connection: "HotConnection") -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRoute:
    before: bytes
    """The request line up to the name of the run, or all of it."""
    after: bytes | None
    """The rest of the request line behind the name of the run; None where it names none."""
    content_types: frozenset[bytes]
    encodings: frozenset[bytes]
    answer: HotAnswer
    refuse: Callable[[Exception], web.Response]
    body_s: float
    """Within which the body must have arrived."""
    is_native: bool


class HotRoutes:
    """The hot routes of one application."""

    def __init__(self, bodies: BodyReader) -> None:
        self.bodies = bodies
        self._routes: list[HotRoute] = []
        self._seen: dict[bytes, Asked] = {}
        """Heads by all but their length: a client sends the same one with every request."""

    def add(self, route: HotRoute) -> None:
        self._routes.append(route)

    def keep_native(self) -> None:
        """Leave the routes of other dialects to aiohttp, which has a door before them."""
        self._routes = [route for route in self._routes if route.is_native]
        self._seen.clear()

    def recognise(self, data: bytes) -> Asked | None:
        """What the first bytes of a request ask for. None: not for us."""
        end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD)
        if end < 0:
            return None
        found = data.find(LENGTH, 0, end)
        if found < 0:
            return self._read(data[:end], end + 4)
        at = found + len(LENGTH)
        behind = data.find(b"\r\n", at, end + 2)
        length, known = data[at:behind], data[:at] + data[behind:end]
        seen = self._seen.get(known)
        if seen is not None and length.isdigit() and len(length) <= MOST_DIGITS:
            size = int(length)
            return None if size > self.bodies.most_bytes else Asked(seen.route, seen.run, seen.headers, end + 4, size)
        asked = self._read(data[:end], end + 4)
        if asked is not None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen[known] = asked
        return asked

    def _read(self, head: bytes, begin: int) -> Asked | None:
        lines = head.split(b"\r\n")
        target = lines[0]
        for route in self._routes:
            if route.after is None:
                if target == route.before:
                    return self._read_head(route, "", lines, begin)
            elif target.startswith(route.before) and target.endswith(route.after):
                run = target[len(route.before) : -len(route.after)]
                # Names that need no decoding; the others are aiohttp's.
                if run.translate(None, b"-_.").isalnum() and len(run) <= LONGEST_PLAIN_NAME:
                    return self._read_head(route, run.decode(), lines, begin)
        return None

    def _read_head(self, route: HotRoute, run: str, lines: list[bytes], begin: int) -> Asked | None:
        headers: dict[bytes, bytes] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            name = name.lower()
            if not colon or name not in KNOWN_HEADERS or name in headers:
                return None
            headers[name] = value.strip()
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > MOST_DIGITS:
            return None
        if headers.get(b"content-type") not in route.content_types:
            return None
        if headers.get(b"content-encoding", b"") not in route.encodings:
            return None
        if b"connection" in headers and headers[b"connection"].lower() != b"keep-alive":
            return None
        if b"json" in headers.get(b"accept", b"") and route.is_native:
            return None
        size = int(length)
        return None if size > self.bodies.most_bytes else Asked(route, run, headers, begin, size)


HOT_ROUTES = web.AppKey("hot_routes", HotRoutes)


@dataclass(slots=True)
class _UnderWay:
    """One hot request: its body comes in, then it is answered."""

    asked: Asked
    parts: list[bytes | memoryview]
    have: int
    reserved: int = 0
    timer: asyncio.TimerHandle | None = None
    answering: asyncio.Task[None] | None = None
    ahead: list[bytes] = field(default_factory=list)
    ahead_bytes: int = 0


class HotConnection(RequestHandler):
    """A connection of aiohttp's server that answers hot requests itself. Those come and go between aiohttp's own."""

    __slots__ = ("_hot", "_routes")

    def __init__(self, routes: HotRoutes, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._routes = routes
        self._hot: _UnderWay | None = None

    # ------------------------------------------------------------------ in

    def data_received(self, data: bytes) -> None:
        if self._hot is not None:
            self._take(self._hot, data)
        elif data.startswith(b"POST ") and self._is_idle():
            asked = self._routes.recognise(data)
            if asked is None or not self._begin(asked, data):
                super().data_received(data)
        else:
            super().data_received(data)

    def _is_idle(self) -> bool:
        """Whether aiohttp waits for the first byte of a request."""
        return (
            self._waiter is not None
            and not self._waiter.done()
            and not self._messages
            and self._current_request is None
            and self._payload_parser is None
            and not self._upgraded
            and not self._close
            and not self._force_close
        )

    def _begin(self, asked: Asked, data: bytes) -> bool:
        have = len(data) - asked.begin
        under_way = _UnderWay(asked, [memoryview(data)[asked.begin :]], have)
        if have < asked.size:
            try:
                self._routes.bodies.reserve(asked.size)
            except TransientError:
                return False  # aiohttp refuses it with the right words
            under_way.reserved = asked.size
            under_way.timer = self._loop.call_later(asked.route.body_s, self._too_slow, under_way)
        self._hot = under_way
        # Whoever shuts the server down waits for this one, as for any other.
        self._request_in_progress = True
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if have >= asked.size:
            self._answer(under_way)
        return True

    def _take(self, under_way: _UnderWay, data: bytes) -> None:
        if under_way.answering is not None:
            under_way.ahead.append(data)
            under_way.ahead_bytes += len(data)
            if under_way.ahead_bytes > MOST_AHEAD:
                self._pause_transport_reading()
            return
        under_way.parts.append(data)
        under_way.have += len(data)
        if under_way.have >= under_way.asked.size:
            self._answer(under_way)

    # ------------------------------------------------------------------ out

    def _answer(self, under_way: _UnderWay) -> None:
        parts, size = under_way.parts, under_way.asked.size
        body = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        if len(body) > size:
            rest = bytes(body[size:])
            under_way.ahead, under_way.ahead_bytes = [rest], len(rest)
            body = body[:size]
        parts.clear()
        self._release(under_way)
        self._routes.bodies.received_bytes += size
        under_way.answering = self._loop.create_task(self._respond(under_way, body))

    async def _respond(self, under_way: _UnderWay, body: memoryview) -> None:
        try:
            await under_way.asked.route.answer(under_way.asked, body, self)
            await self._drain_helper()
        except (ConnectionError, asyncio.CancelledError):
            self._hang_up()
        except Exception as error:  # as aiohttp does: told in the log, and the client hears that it was us
            self.log_exception("a hot request failed", exc_info=error)
            self.send(HotReply(body=b"500 Internal Server Error", content_type="text/plain", status=500, closes=True))
        finally:
            self._end(under_way)

    def send(self, reply: HotReply) -> None:
        """Hand the reply to the transport."""
        if self.transport is not None:
            self.transport.write(reply.encoded())
            if reply.closes:
                self._close = True

    async def deliver(self, reply: HotReply) -> None:
        """Send it and wait until it is in the hands of the kernel. Raises when the client has gone."""
        self.send(reply)
        wait_s = 0.0  # the event loop writes what it was given when it comes round
        while True:
            transport = self.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client went away before it had its answer")
            if transport.get_write_buffer_size() == 0:
                return
            await asyncio.sleep(wait_s)
            wait_s = FLUSH_POLL_S

    def _too_slow(self, under_way: _UnderWay) -> None:
        route = under_way.asked.route
        error = SlowBodyError(f"the body did not arrive within {route.body_s:g} s; send it again")
        reply = HotReply.of(route.refuse(error))
        # What is still to come of the body is not waited for.
        self.send(HotReply(body=reply.body, content_type=reply.content_type, status=reply.status, closes=True))
        self._end(under_way)

    def _release(self, under_way: _UnderWay) -> None:
        self._routes.bodies.release(under_way.reserved)
        under_way.reserved = 0
        if under_way.timer is not None:
            under_way.timer.cancel()
            under_way.timer = None

    def _end(self, under_way: _UnderWay) -> None:
        """Ready for the next request, which may have come already."""
        self._release(under_way)
        if self._hot is not under_way:
            return
        self._hot = None
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        if self._close or self._force_close:
            if self.transport is not None:
                self.transport.close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if under_way.ahead_bytes > MOST_AHEAD:
            self._resume_transport_reading()
        if under_way.ahead:
            self.data_received(b"".join(under_way.ahead))

    def _hang_up(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """What was read to its end is stored all the same: its answer finds nobody."""
        if self._hot is not None and self._hot.answering is None:
            self._end(self._hot)
        super().connection_lost(exc)


@asynccontextmanager
async def answering(app: web.Application, sock: Any, *, drain_s: float, backlog: int) -> AsyncIterator[None]:
    """Answer an application's requests on a listening socket; at the end what is under way gets `drain_s` to end."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=drain_s, handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()
    options = {"loop": loop, **server._kwargs}
    routes = app[HOT_ROUTES]
    listening = await loop.create_server(lambda: HotConnection(routes, server, **options), sock=sock, backlog=backlog)
    try:
        yield
    finally:
        listening.close()
        await runner.cleanup()
