"""Server-sent events: how every server of the package writes them."""

import msgspec
from aiohttp import web

HEADERS = {
    # Some clients decode text without a charset as Latin-1.
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore. It shows proxies that the connection is in use."""


def json_event(value: object, name: str | None = None) -> bytes:
    return event(msgspec.json.encode(value), name)


def event(data: bytes, name: str | None = None) -> bytes:
    """`data`: one line."""
    lead = b"" if name is None else f"event: {name}\n".encode()
    return lead + b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")
"""The last event of OpenAI's streams."""


class EventStream:
    """The response to one request. The first write opens it, so that an earlier error can still set the HTTP status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def write(self, *events: bytes) -> None:
        """Without events: only open the stream."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        for part in events:
            await self.response.write(part)

    async def end(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response
