"""ASGI middleware for vLLM: requests that control a server need the run's token, and web pages may not call it.

vLLM's `--api-key` does not cover its development routes, with which weights are replaced. A run copies this file to its directory
and starts vLLM with `--middleware`. Another interpreter imports it, so it uses the standard library only.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_FILE = "ROLLBOOK_VLLM_TOKEN_FILE"
"""The variable with the path of the token file."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/load",
        "/weight_info",
        "/is_paused",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/inference/v1/generate",
    }
)
"""Open to every process of this machine, as on Rollbook's own policy server. All other routes control the server."""


class VllmGuard:
    def __init__(self, app: App) -> None:
        self._app = app
        self._digest = _digest(Path(os.environ[TOKEN_FILE]).read_text(encoding="ascii").strip().encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        status, problem = self._problem(scope)
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
        else:
            await _respond(send, status, problem)

    def _problem(self, scope: Scope) -> tuple[int, str]:
        """Status and reason of a refusal; an empty reason if the request may pass."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if _name(host) not in LOCAL_NAMES:
            return 403, f"this server is not known as {host[:200]!r}"
        site = headers.get(b"sec-fetch-site", b"none")
        if b"origin" in headers or site not in (b"none", b"same-origin"):
            return 403, "web pages may not call this server"
        if scope["path"] in OPEN_PATHS or self._has_token(headers.get(b"authorization", b"")):
            return 200, ""
        return 401, f"{scope['path'][:200]} needs the access token of the run: 'Authorization: Bearer …'"

    def _has_token(self, authorization: bytes) -> bool:
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self._digest)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _name(host: str) -> str:
    """The name in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


async def _respond(send: Send, status: int, problem: str) -> None:
    error = {"message": problem, "type": "refused", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
