"""Guards a simulator: admin requests need a token that only its owner has, and web pages are refused.

MiniStack serves admin requests (reset, configuration, health) on the port of the cloud. Without the token an agent could send them:
S3 puts the name of a bucket into the path, and the CLI accepts the bucket `_ministack`. A page in a browser on this machine could
send forms, which many services accept. `access/guard.py` is not used, because it would load aiohttp into every simulator.
"""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

HEADER = "X-Rollbook-Admin"
# An environment variable, because the arguments of a process are visible to every user of the machine.
TOKEN_VARIABLE = "ROLLBOOK_SIMULATOR_TOKEN"
PREFIXES = ("_ministack", "_localstack")
BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site"})
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def is_admin_path(path: str) -> bool:
    """Whether MiniStack itself answers the path. In AWS no bucket name begins with `_`."""
    segments = [part for part in path.split("/") if part not in {"", ".", ".."}]
    return path == "/health" or (bool(segments) and segments[0].lower().startswith(PREFIXES))


def is_from_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sent the request, or the name of the host is not ours (DNS rebinding)."""
    host = headers.get(b"host", b"").rpartition(b":")[0].lower()
    return (
        not BROWSER_HEADERS.isdisjoint(headers)
        or headers.get(b"user-agent", b"").startswith(b"Mozilla/")
        or not (host in {b"127.0.0.1", b"localhost"} or host.endswith(b".localhost"))
    )


def guarded(app: AsgiApp, token: str) -> AsgiApp:
    """The application, which answers requests of browsers with 403, and admin requests without the token with 404."""

    async def check(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            headers = dict(scope["headers"])
            if is_from_browser(headers):
                await _refuse(scope, send, 403, b"web pages may not call a simulator")
                return
            given = headers.get(HEADER.lower().encode(), b"")
            if is_admin_path(scope["path"]) and not hmac.compare_digest(given, token.encode()):
                await _refuse(scope, send, 404, b"not found")
                return
        await app(scope, receive, send)

    return check


async def _refuse(scope: Any, send: Any, status: int, reason: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})
