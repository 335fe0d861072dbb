"""A rollout service: `POST /rollouts` around a function that plays episodes.

    service = FunctionService(tokenizer.identity, play)     # async def play(request) -> RolloutSample | None
    async with serve_rollouts(service, port=9000): ...

A request id is one episode: a repeated request joins it. `DELETE /rollouts/ID` cancels it, and so does its deadline. The class of
an exception decides the HTTP status.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from rollbook.access.guard import AllowedClients, is_loopback
from rollbook.access.server import for_any_name, serve_app
from rollbook.access.tokens import Secret, bearer_token
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RollbookError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.policy import EpisodeContext, enter_episode
from rollbook.rollout.remote.protocol import (
    TOKENIZER_MISMATCH,
    RolloutReply,
    RolloutRequest,
    RolloutService,
    TokenizerMismatchError,
    reply_of,
    require_same_tokenizer,
)

MAX_BODY_BYTES = 4 * 2**20
KEPT_S = 60.0
"""How long a reply is kept for a client that lost its connection."""

Play = Callable[[RolloutRequest], Awaitable[RolloutSample | None]]


class FunctionService:
    """A `RolloutService` that calls a function for each request."""

    def __init__(self, tokenizer_id: str, play: Play) -> None:
        self.tokenizer_id = tokenizer_id
        self._play = play

    async def play(self, request: RolloutRequest) -> RolloutReply | None:
        # An `EpisodePolicy` used by the function reads the minimum publication and the time left from this context.
        enter_episode(
            EpisodeContext(
                group_id=GroupId(request.request_id),
                min_publication=request.min_publication,
                until=time.monotonic() + request.deadline_s,
            )
        )
        sample = await self._play(request)
        return None if sample is None else reply_of(sample, tokenizer_id=self.tokenizer_id)


class _Handlers:
    def __init__(self, service: RolloutService, token: str | None) -> None:
        self._service = service
        self._secret = None if token is None else Secret(token)
        self._episodes: dict[str, asyncio.Task[RolloutReply | None]] = {}
        self._decode = json_decoder(RolloutRequest).decode_body

    async def post(self, request: web.Request) -> web.Response:
        if not self._is_authorized(request):
            return _error(401, "unauthorized", "a bearer token is required")
        try:
            rollout = self._decode(await request.read())
            require_same_tokenizer(self._service.tokenizer_id, rollout.tokenizer_id, where="the client")
        except (msgspec.MsgspecError, ValueError) as error:
            return _error(400, "bad_request", str(error))
        except TokenizerMismatchError as error:
            return _error(409, TOKENIZER_MISMATCH, str(error))
        episode = self._episodes.get(rollout.request_id)
        if episode is None:
            episode = asyncio.create_task(self._play(rollout), name=f"service.{rollout.request_id}")
            self._episodes[rollout.request_id] = episode
            episode.add_done_callback(lambda _: self._forget_later(rollout.request_id))
        return await self._respond(episode)

    async def delete(self, request: web.Request) -> web.Response:
        if not self._is_authorized(request):
            return _error(401, "unauthorized", "a bearer token is required")
        episode = self._episodes.get(request.match_info["id"])
        if episode is None:
            return _error(404, "unknown_rollout", "this rollout is not being played")
        episode.cancel()
        return _json({"status": "cancelled"})

    async def health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok", "tokenizer_id": self._service.tokenizer_id, "playing": len(self._episodes)})

    async def close(self, _: web.Application) -> None:
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)

    async def _play(self, rollout: RolloutRequest) -> RolloutReply | None:
        async with asyncio.timeout(rollout.deadline_s):
            return await self._service.play(rollout)

    async def _respond(self, episode: asyncio.Task[RolloutReply | None]) -> web.Response:
        try:
            # Shielded, because a client that lost its connection may join the episode again.
            return _json(await asyncio.shield(episode))
        except asyncio.CancelledError:
            if episode.cancelled():
                return _error(410, "cancelled", "this rollout was cancelled")
            raise
        except TimeoutError:
            return _error(504, "deadline", "the rollout did not end within its deadline")
        except TransientError as error:
            return _error(503, "unavailable", str(error))
        except RollbookError as error:
            return _error(422, "episode_failed", str(error))
        except Exception as error:
            return _error(422, "episode_failed", f"the rollout raised {describe_error(error)}")

    def _is_authorized(self, request: web.Request) -> bool:
        return self._secret is None or self._secret.matches(bearer_token(request.headers.get("Authorization")))

    def _forget_later(self, request_id: str) -> None:
        asyncio.get_running_loop().call_later(KEPT_S, self._episodes.pop, request_id, None)


def rollout_app(service: RolloutService, *, token: str | None = None) -> web.Application:
    handlers = _Handlers(service, token)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/rollouts", handlers.post)
    app.router.add_delete(for_any_name("/rollouts/{id}"), handlers.delete)
    app.router.add_get("/health", handlers.health)
    app.on_shutdown.append(handlers.close)
    return app


@asynccontextmanager
async def serve_rollouts(
    service: RolloutService,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    allowed: AllowedClients | None = None,
) -> AsyncIterator[str]:
    """Listen, and yield the URL. A token is required unless the host is loopback, because requests use sandboxes and compute."""
    if token is None and not is_loopback(host):
        raise ValueError(f"{host} can be reached from other machines: a token is required")
    app = rollout_app(service, token=token)
    async with serve_app(
        app, listening_socket(host, port), allowed=allowed, drain_s=1.0, is_cancelled_on_disconnect=False
    ) as url:
        yield url


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, kind: str, message: str) -> web.Response:
    return _json({"error": {"type": kind, "message": message}}, status=status)
