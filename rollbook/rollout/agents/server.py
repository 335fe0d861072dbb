"""A server in the rollout worker, compatible with OpenAI's and Anthropic's APIs, through which unmodified agents play episodes.

A session is one episode. It is named in the path (`/s/SESSION/v1`, so that a `base_url` is enough), in the header
`X-Rollbook-Session`, or as the API key. The server starts with the first session and stops with the worker.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from rollbook.access.event_stream import EventStream, event
from rollbook.access.guard import REFUSE, AllowedClients, Problem
from rollbook.access.server import for_any_name, serve_app
from rollbook.access.tokens import bearer_token
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, RollbookError, TransientError
from rollbook.contracts.policy import SamplingParams
from rollbook.rollout.agents.anthropic_messages import MessagesReply, messages_error, messages_request
from rollbook.rollout.agents.chat_completions import ChatCompletion, models, openai_error
from rollbook.rollout.agents.lineage import RequestOrigin, TrainOnly, read_origin
from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.responses import ResponsesReply
from rollbook.rollout.agents.session import ChatRequest, ChatTurn, ContextFullError, EpisodeOverError, ProxySession
from rollbook.rollout.agents.streaming import TurnPart
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.rollout.contract import OpenChatSession, Tokenizer
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits

MAX_BODY_BYTES = 4 * 2**20
SESSION_HEADER = "X-Rollbook-Session"
CONVERSATION_HEADER = "X-Session-ID"
"""Names the conversation of a request, in a session that has several. verifiers sends it."""


class AgentReply(Protocol):
    """The response of one API to one request."""

    request: ChatRequest

    def whole(self, turn: ChatTurn) -> dict[str, Any]: ...

    def part(self, part: TurnPart) -> Iterable[bytes]: ...

    def end(self, turn: ChatTurn) -> Iterable[bytes]: ...


@dataclass(frozen=True, slots=True)
class AgentApi:
    """One API: its replies, and the form of its errors."""

    reply: Callable[[Mapping[str, Any], ProxySession], AgentReply]
    error: Callable[[int, str, str, str | None], dict[str, Any]]
    """From HTTP status, kind, message and field."""
    error_event: str | None = None
    """The name of the event for an error in a stream."""


APIS = {
    "chat/completions": AgentApi(ChatCompletion, openai_error),
    "responses": AgentApi(ResponsesReply, openai_error),
    "messages": AgentApi(MessagesReply, messages_error, "error"),
}
"""By route."""


class MakeSession(Protocol):
    def __call__(self, *, assembler: str, tool_parser: str, train_only: str) -> ProxySession: ...


class ProxyServer:
    def __init__(
        self,
        make_session: MakeSession,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: AllowedClients | None = None,
    ) -> None:
        self._make_session = make_session
        self._host = host
        self._port = port
        self._allowed = allowed
        self._sessions: dict[str, ProxySession] = {}
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def session(
        self,
        *,
        assembler: str = "branching",
        tool_parser: str = "hermes",
        train_only: str = TrainOnly.ALL,
        has_conversations: bool = False,
    ) -> AsyncIterator[ProxySession]:
        """A session for the current episode, closed at its end even if the agent still runs."""
        await self.start()
        session = self._make_session(assembler=assembler, tool_parser=tool_parser, train_only=train_only)
        session.base_url = f"{self._url}/s/{session.id}/v1"
        session.conversations = {} if has_conversations else None
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            session.close()
            del self._sessions[session.id]

    async def start(self) -> str:
        """Listen, if not done yet. Returns the URL."""
        async with self._starting:
            if not self._url:
                sock = listening_socket(self._host, self._port)
                self._url = await self._stack.enter_async_context(
                    serve_app(self.app(), sock, allowed=self._allowed, drain_s=1.0)
                )
            return self._url

    async def close(self) -> None:
        await self._stack.aclose()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app[REFUSE] = _refuse
        for prefix in ("", for_any_name("/s/{session}")):
            for route, api in APIS.items():
                app.router.add_post(f"{prefix}/v1/{route}", partial(self.respond, api=api))
            counting = partial(self.respond, api=APIS["messages"], is_counted_only=True)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", counting)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name:.+}}", self._model)
            app.router.add_route("*", f"{prefix}/v1/{{route:.*}}", self._unknown_route)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return _json(models())

    async def _model(self, _request: web.Request) -> web.Response:
        """Every name is that of the policy: agents choose their own."""
        return _json(models()["data"][0])

    async def _unknown_route(self, request: web.Request) -> web.Response:
        route = request.match_info["route"]
        hint = "; Anthropic's clients need the base URL without /v1" if route.startswith("v1/messages") else ""
        served = ", ".join(f"/v1/{name}" for name in APIS)
        message = f"{request.method} /v1/{route} is not served here; use POST {served}{hint}"
        return _error(_api_of(request), 404, "not_found", message)

    async def respond(
        self, request: web.Request, api: AgentApi, *, is_counted_only: bool = False
    ) -> web.StreamResponse:
        """`is_counted_only`: the number of tokens of a request in Anthropic's form, and no turn."""
        try:
            session, body = await self._read(request)
            if is_counted_only:
                return _json({"input_tokens": await session.count_tokens(messages_request(body, is_counted_only=True))})
            reply = api.reply(body, session)
            origin = read_origin(request.headers, body.get("model"))
            if body.get("stream"):
                return await _stream(request, session, reply, api, origin)
            turn = await session.complete(reply.request, origin=origin)
            return _json(reply.whole(turn))
        except RollbookError as error:
            return _error_of(api, error)

    async def _read(self, request: web.Request) -> tuple[ProxySession, dict[str, Any]]:
        name = self.name_of(request)
        session = self._sessions.get(name) or self.unknown_session(name)
        if session.conversations is not None:
            session = session.conversation(request.headers.get(CONVERSATION_HEADER, ""))
        try:
            body = json_decoder(Any).decode_body(await request.read())
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadChatError(f"the body is not JSON, or nested too deeply: {error}") from error
        if not isinstance(body, dict):
            raise BadChatError("the body must be a JSON object")
        return session, body

    def name_of(self, request: web.Request) -> str:
        """The name of the session: in the path, in a header, or as the API key."""
        return request.match_info.get("session") or request.headers.get(SESSION_HEADER) or api_key(request)

    def unknown_session(self, name: str) -> ProxySession:
        """For a name that is not open. An error in a worker; `rollbook proxy` opens a session instead."""
        raise UnknownSessionError(f"no episode {name!r} is open here: it is over, or the base_url is wrong")


def api_key(request: web.Request) -> str:
    """As OpenAI's and as Anthropic's clients send it."""
    return bearer_token(request.headers.get("Authorization")) or request.headers.get("x-api-key", "")


def _api_of(request: web.Request) -> AgentApi:
    is_anthropic = "/v1/messages" in request.path or "anthropic-version" in request.headers
    return APIS["messages" if is_anthropic else "responses"]


class UnknownSessionError(EpisodeError):
    """A request for an episode that is not open."""


@asynccontextmanager
async def open_proxy_sessions(
    policy: EpisodePolicy, tokenizer: Tokenizer, sampling: SamplingParams, limits: EpisodeLimits
) -> AsyncIterator[OpenChatSession]:
    """`RolloutSetup.open_proxy_session` of a worker."""

    def make(*, assembler: str, tool_parser: str, train_only: str) -> ProxySession:
        return ProxySession(
            policy=policy,
            tokenizer=tokenizer,
            sampling=sampling,
            limits=limits,
            parser=load_parser(tool_parser),
            assembler=assembler,
            train_only=train_only,
        )

    server = ProxyServer(make)
    try:
        yield server.session
    finally:
        await server.close()


async def _stream(
    request: web.Request, session: ProxySession, reply: AgentReply, api: AgentApi, origin: RequestOrigin
) -> web.StreamResponse:
    """Send parts of the turn while it is sampled. If the agent stops reading, this is cancelled and the turn ends there.

    The first part opens the stream, so an earlier error still has its HTTP status. A later one is sent as an event.
    """
    # Never longer than the turn, whose tokens are limited.
    parts: asyncio.Queue[TurnPart | None] = asyncio.Queue()
    turn_of = session.complete(reply.request, parts.put_nowait, origin=origin)
    playing = asyncio.create_task(turn_of, name=f"proxy.turn.{session.id}")
    playing.add_done_callback(lambda _: parts.put_nowait(None))
    stream = EventStream(request)
    try:
        with suppress(ConnectionError):
            while (part := await parts.get()) is not None:
                await stream.write(*reply.part(part))
        turn = await playing
    except RollbookError as error:
        if not stream.is_open:
            raise
        failure = _error_of(api, error).body
        assert isinstance(failure, bytes)
        last: Iterable[bytes] = [event(failure, api.error_event)]
    else:
        last = reply.end(turn)
    finally:
        playing.cancel()
    with suppress(ConnectionError):
        await stream.write(*last)
        await stream.end()
    return stream.response


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error_of(api: AgentApi, error: RollbookError) -> web.Response:
    match error:
        case BadChatError():
            return _error(api, 400, "invalid_request_error", str(error), error.param)
        case UnknownSessionError():
            return _error(api, 404, "unknown_session", str(error))
        case ContextFullError():
            return _error(api, 400, "context_length_exceeded", str(error))
        case EpisodeOverError():
            return _error(api, 410, "episode_over", str(error))
        case TransientError():
            return _error(api, 503, "policy_unavailable", str(error))
        case EpisodeError():
            return _error(api, 422, "episode_failed", str(error))
        case _:
            return _error(api, 500, "run_failed", str(error))


def _error(api: AgentApi, status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    response = _json(api.error(status, kind, message, param), status=status)
    # The policy client has retried within the episode's deadline; retries of the agent would only hide the cause.
    response.headers["x-should-retry"] = "false"
    return response


def _refuse(request: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    return _error(_api_of(request), problem.status, "invalid_request_error", message)
