"""A teacher behind a real HTTP server that counts what it is asked."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web


@asynccontextmanager
async def counted(url: str, *, versions: Sequence[int] = ()) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that passes requests on to `url`, and the bodies of those for scores of token ids. `versions`: those that it
    reports for them, one after the other."""
    reported = iter(versions)
    bodies: list[Any] = []

    async def forward(request: web.Request) -> web.Response:
        raw = await request.read()
        if raw and isinstance(json.loads(raw).get("prompt"), list):
            bodies.append(json.loads(raw))
        target = url.removesuffix("/v1") + request.path
        async with (
            ClientSession() as session,
            session.request(request.method, target, data=raw, headers={"Content-Type": "application/json"}) as response,
        ):
            answer = await response.read()
            if (
                raw
                and isinstance(json.loads(raw).get("prompt"), list)
                and (version := next(reported, None)) is not None
            ):
                found = json.loads(answer)
                found["choices"][0]["logprobs"]["prompt_version"] = version
                answer = json.dumps(found).encode()
            return web.Response(body=answer, status=response.status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", bodies  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()
