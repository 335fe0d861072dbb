"""Server-sent events: the bytes, and when the response is opened."""

import aiohttp
from aiohttp import web

from rollbook.access.event_stream import DONE, KEEP_ALIVE, EventStream, event, json_event
from rollbook.access.server import serve_app
from rollbook.concurrency.sockets import listening_socket


def test_an_event_has_a_name_if_one_is_set_and_ends_with_an_empty_line() -> None:
    assert json_event({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
    assert json_event([1], "status") == b"event: status\ndata: [1]\n\n"
    assert event(b"{}") == b"data: {}\n\n"


async def test_an_error_before_the_first_event_still_sets_the_status() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request)
        if request.query.get("fail"):
            raise web.HTTPServiceUnavailable
        await stream.write(KEEP_ALIVE, json_event("é"))
        assert stream.is_open
        await stream.write(DONE)
        return await stream.end()

    app = web.Application()
    app.router.add_get("/", handle)
    async with serve_app(app, listening_socket("127.0.0.1", 0)) as url, aiohttp.ClientSession() as session:
        async with session.get(url + "/?fail=1") as response:
            assert response.status == 503
        async with session.get(url + "/") as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await response.text() == ': keep-alive\n\ndata: "é"\n\ndata: [DONE]\n\n'
