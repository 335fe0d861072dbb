"""Admin requests of a simulator need a token that only its owner has.

MiniStack serves them (reset, configuration, health) on the port of the cloud. Without the token an agent could send them: S3 puts
the name of a bucket into the path, and the CLI accepts the bucket `_ministack`.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

HEADER = "X-Rollbook-Admin"
# An environment variable, because the arguments of a process are visible to every user of the machine.
TOKEN_VARIABLE = "ROLLBOOK_SIMULATOR_TOKEN"
PREFIXES = ("_ministack", "_localstack")
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def is_admin_path(path: str) -> bool:
    """Whether MiniStack itself answers the path. In AWS no bucket name begins with `_`."""
    segments = [part for part in path.split("/") if part not in {"", ".", ".."}]
    return path == "/health" or (bool(segments) and segments[0].lower().startswith(PREFIXES))


def with_admin_token(app: AsgiApp, token: str) -> AsgiApp:
    """The application, which answers admin requests without the token with 404."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and is_admin_path(scope["path"]):
            given = dict(scope["headers"]).get(HEADER.lower().encode(), b"")
            if not hmac.compare_digest(given, token.encode()):
                await _refuse(scope, send)
                return
        await app(scope, receive, send)

    return guarded


async def _refuse(scope: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b"not found"})
