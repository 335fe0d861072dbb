"""An OpenEnv server: HTTP and WebSocket routes over sessions.

    GET  /ws             one session: reset, step, state, close, mcp    503 before the upgrade if no slot is free
    POST /reservations   reserve N slots, with a wait                   DELETE /reservations/{id} cancels the unclaimed ones
    GET  /health  /metadata  /schema  /state                            use no environment
    POST /reset  /step                                                  without a session: first observation only
    POST /mcp            tools, in a session that openenv/session/create opened; /ws?session_id=… joins it

Nothing blocks the event loop: plain environments run in threads, and a dead client is detected while its step still runs.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from rollbook.access.guard import REFUSE
from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RollbookError
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.environment import EnvironmentPool
from rollbook.envs.server.auth import error_message, refuse, report_errors, require_token
from rollbook.envs.server.mcp import answer_mcp, mcp_error, mcp_result
from rollbook.envs.server.playground import Playground, mount_playground
from rollbook.envs.server.protocol import (
    HEALTH_PATH,
    RESERVATIONS_PATH,
    SCHEMA_PATH,
    SOCKET_PATH,
    Dialect,
    EnvRequest,
    EnvVerb,
    EpisodeState,
    ErrorCode,
    ReplyKind,
    TextDialect,
    WireError,
    encode,
    encode_body,
    episode_id_of,
    read_request,
    result_data,
)
from rollbook.envs.server.reservations import ReservationId
from rollbook.envs.server.sessions import Session, SessionEndedError, SessionManager
from rollbook.telemetry.events import EventLog

# A client sends one message and waits for the reply; a few more are for clients that do not wait.
INBOX_SIZE = 8
PROTOCOL_VERSION = "1.0.0"
"""The version of OpenEnv's HTTP interface."""
ROUTES = (
    ("get", HEALTH_PATH, "Whether environments are ready, and how many are in use"),
    ("get", "/metadata", "Name and description"),
    ("get", "/schema", "JSON schemas of actions, observations and state"),
    ("get", "/state", "The state without an episode"),
    ("post", "/reset", "The first observation of a task"),
    ("post", "/step", "Refused: a step needs a session"),
    ("post", "/mcp", "MCP: tools/list, tools/call, openenv/session/create, openenv/session/close"),
    ("post", RESERVATIONS_PATH, "Reserve sessions for a group"),
    ("get", SOCKET_PATH, "A WebSocket with one session"),
)
# The wait for the client's half of the closing handshake. The slot is already free at that point.
CLOSE_HANDSHAKE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """The content of `/metadata`, and tasks: for the playground, and for a reset without one."""

    name: str
    description: str = ""
    tasks: Sequence[Mapping[str, Any]] = ()


class ReservationRequest(msgspec.Struct, forbid_unknown_fields=True):
    sessions: int
    wait_s: float = 0.0


def build_app(
    pool: EnvironmentPool,
    config: EnvServerConfig,
    *,
    info: EnvironmentInfo,
    dialect: Dialect | None = None,
    log: EventLog | None = None,
) -> web.Application:
    """The application over an open pool. Raises `RunError` for settings that contradict each other."""
    sessions = SessionManager(pool, config, clock=SystemClock(), log=log or EventLog("env-server"))
    server = _Server(pool, sessions, config, info=info, dialect=dialect or TextDialect())
    app = web.Application(middlewares=[require_token(config), report_errors], client_max_size=config.max_message_bytes)
    app[REFUSE] = refuse
    app.router.add_get(SOCKET_PATH, server.socket)
    app.router.add_post(RESERVATIONS_PATH, server.reserve)
    app.router.add_delete(RESERVATIONS_PATH + "/{reservation}", server.cancel_reservation)
    app.router.add_get(HEALTH_PATH, server.health)
    app.router.add_get("/openapi.json", server.openapi)
    app.router.add_get("/metadata", server.metadata)
    app.router.add_get(SCHEMA_PATH, server.schema)
    app.router.add_get("/state", server.state)
    app.router.add_post("/reset", server.reset)
    app.router.add_post("/step", server.step)
    app.router.add_post("/mcp", server.mcp)
    if config.playground:
        page = Playground(
            name=info.name,
            description=info.description,
            tasks=info.tasks,
            max_steps=config.max_steps,
            step_s=config.step_s,
            idle_s=config.idle_s,
        )
        mount_playground(app, page, capacity=sessions.capacity)
    app.cleanup_ctx.append(server.sweep_context)
    app.on_shutdown.append(server.stop)
    return app


class _Server:
    def __init__(
        self,
        pool: EnvironmentPool,
        sessions: SessionManager,
        config: EnvServerConfig,
        *,
        info: EnvironmentInfo,
        dialect: Dialect,
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._config = config
        self._info = info
        self._dialect = dialect
        self._sockets: set[web.WebSocketResponse] = set()
        self._joined: set[str] = set()
        """Sessions of `/mcp` that have a socket."""

    async def sweep_context(self, _: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(self._sessions.run(), name="envs.sweep")
            yield
            sweeper.cancel()

    async def stop(self, _: web.Application) -> None:
        """Close every session and socket; an open socket would keep the application from ending."""
        await self._sessions.close_all()
        closing = (
            socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops") for socket in list(self._sockets)
        )
        await asyncio.gather(*closing, return_exceptions=True)

    # --- one session over one socket ---

    async def socket(self, request: web.Request) -> web.StreamResponse:
        if "session_id" in request.query:
            return await self._join(request, self._sessions.find(request.query["session_id"]))
        slot = await self._sessions.take_slot(request.query.get("reservation"))
        # autoclose off: the reply to a client's close is sent after its slot is free, so that it can reconnect at once.
        # No compression: messages are short, and compressing them takes longer than a step.
        socket = web.WebSocketResponse(
            timeout=CLOSE_HANDSHAKE_S, autoclose=False, compress=False, max_msg_size=self._config.max_message_bytes
        )
        try:
            await socket.prepare(request)
        except BaseException:
            slot.release()
            raise
        self._sockets.add(socket)
        try:
            try:
                session = await self._sessions.open(slot)
            except RollbookError as error:
                await _send(socket, error_message(error))
                return socket
            try:
                await self._serve_session(session, socket)
            finally:
                await self._sessions.close(session, "the client left")
        finally:
            self._sockets.discard(socket)
            with suppress(ConnectionError, RuntimeError):
                await socket.close()
        return socket

    async def _join(self, request: web.Request, session: Session) -> web.StreamResponse:
        """A socket for a session that was opened over `/mcp`. The session stays open when the socket closes, unless it failed."""
        if session.id in self._joined:
            raise WireError(ErrorCode.SESSION_ERROR, f"session {session.id} already has a connection")
        socket = web.WebSocketResponse(compress=False, max_msg_size=self._config.max_message_bytes)
        self._joined.add(session.id)
        try:
            await socket.prepare(request)
            self._sockets.add(socket)
            await self._serve_session(session, socket)
        finally:
            self._joined.discard(session.id)
            self._sockets.discard(socket)
            session.on_end = None
            with suppress(ConnectionError, RuntimeError):
                await socket.close()
            await self._close_failed(session)
        return socket

    async def _close_failed(self, session: Session) -> None:
        """Return the environment of a session that cannot be used again."""
        if session.failure is not None:
            await self._sessions.close(session, session.failure)

    async def _serve_session(self, session: Session, socket: web.WebSocketResponse) -> None:
        """Keep reading while the environment works, to detect at once that a client left or died during a step."""
        inbox: asyncio.Queue[str | bytes] = asyncio.Queue(INBOX_SIZE)
        ended = asyncio.Event()
        session.on_end = ended.set
        async with asyncio.TaskGroup() as group:
            children = [
                group.create_task(self._answer(session, socket, inbox), name="envs.answer"),
                group.create_task(_receive(socket, inbox), name="envs.receive"),
                group.create_task(_report_end(session, socket, ended), name="envs.report_end"),
            ]
            await asyncio.wait(children, return_when=asyncio.FIRST_COMPLETED)
            for child in children:
                child.cancel()

    async def _answer(self, session: Session, socket: web.WebSocketResponse, inbox: asyncio.Queue[str | bytes]) -> None:
        """Takes: messages of the inbox. Gives: one reply each, in order. Ends: with `close`, or with the session."""
        while True:
            text = await inbox.get()
            session.touch()
            is_over = False
            try:
                request = read_request(text)
                if request.verb is EnvVerb.CLOSE:
                    return
                reply = await self._reply(session, request)
            except (WireError, RollbookError) as error:
                reply, is_over = error_message(error), isinstance(error, SessionEndedError)
            if not await _send(socket, reply) or is_over or session.failure is not None:
                return

    async def _reply(self, session: Session, request: EnvRequest) -> str:
        match request.verb:
            case EnvVerb.RESET:
                seen = await session.reset(self._task_of(request.data), episode_id=episode_id_of(request.data))
            case EnvVerb.STEP:
                seen = await session.step(self._dialect.action_of(request.data))
            case EnvVerb.MCP:
                return encode(
                    ReplyKind.MCP, await answer_mcp(request.data, session, self._dialect, name=self._info.name)
                )
            case _:
                return encode(ReplyKind.STATE, self._dialect.state(session.episode))
        return encode(ReplyKind.OBSERVATION, result_data(self._dialect, seen, with_facts=self._config.send_facts))

    def _task_of(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The task of a reset. Without one: a task of the server, chosen by the seed."""
        if self._info.tasks and not data.keys() - {"seed", "episode_id"}:
            seed = data.get("seed")
            return random.Random(None if seed is None else str(seed)).choice(list(self._info.tasks))
        return self._dialect.task_of(data)

    # --- slots for groups ---

    async def reserve(self, request: web.Request) -> web.Response:
        try:
            wanted = json_decoder(ReservationRequest).decode_body(await request.read())
        except msgspec.MsgspecError as error:
            raise WireError(
                ErrorCode.VALIDATION_ERROR, f"a reservation request is {{sessions, wait_s}}: {error}"
            ) from error
        if wanted.sessions < 1:
            raise WireError(ErrorCode.VALIDATION_ERROR, f"sessions is {wanted.sessions}; it must be at least 1")
        wait_s = min(max(0.0, wanted.wait_s), self._config.max_reservation_wait_s)
        reservation = await self._sessions.reservations.reserve(wanted.sessions, wait_s=wait_s)
        return web.json_response(
            {"reservation": reservation, "sessions": wanted.sessions, "hold_s": self._config.reservation_hold_s}
        )

    async def cancel_reservation(self, request: web.Request) -> web.Response:
        self._sessions.reservations.cancel(ReservationId(request.match_info["reservation"]))
        return web.json_response({"cancelled": True})

    # --- requests that use no environment ---

    async def health(self, _: web.Request) -> web.Response:
        pool, slots = self._pool.health(), self._sessions.reservations.slots
        body = {
            "status": "healthy" if pool.is_ready else "unhealthy",
            "capacity": self._sessions.capacity,
            "active": slots.in_use,
            "reserved": slots.reserved,
            "waiting": slots.num_waiting,
            "environments_busy": pool.busy,
            "environments_replaced": pool.replaced,
        }
        return web.json_response(body, status=200 if pool.is_ready else 503)

    async def metadata(self, _: web.Request) -> web.Response:
        name, description = self._info.name, self._info.description
        body = {"name": name, "description": description or name, "version": None}
        return web.json_response({**body, "max_sessions": self._sessions.capacity})

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response(dict(self._dialect.schema()))

    async def state(self, _: web.Request) -> web.Response:
        """HTTP has no session, so this is the state without an episode."""
        return web.json_response(dict(self._dialect.state(EpisodeState())))

    # --- requests without a session ---

    async def reset(self, request: web.Request) -> web.Response:
        """The first observation of a task, from an environment that is returned at once."""
        data = await _json_object(request)
        session = await self._sessions.open(await self._sessions.take_slot(None))
        try:
            seen = await session.reset(self._task_of(data), episode_id=episode_id_of(data))
            body = result_data(self._dialect, seen, with_facts=self._config.send_facts)
        finally:
            await self._sessions.close(session, "an HTTP reset has no session")
        return web.Response(text=encode_body(body), content_type="application/json")

    async def step(self, _: web.Request) -> web.Response:
        raise web.HTTPConflict(
            text=encode(
                ReplyKind.ERROR,
                {"message": f"a step needs a session: connect to {SOCKET_PATH}", "code": ErrorCode.SESSION_ERROR},
            ),
            content_type="application/json",
        )

    async def mcp(self, request: web.Request) -> web.Response:
        call = await _json_object(request)
        params = call.get("params")
        session_id = params.get("session_id") if isinstance(params, Mapping) else None
        try:
            match call.get("method"):
                case "openenv/session/create":
                    session = await self._sessions.open(await self._sessions.take_slot(None))
                    return web.json_response(mcp_result(call, {"session_id": session.id}))
                case "openenv/session/close":
                    await self._sessions.close(self._sessions.find(session_id), "the client closed it")
                    return web.json_response(mcp_result(call, {"session_id": session_id, "closed": True}))
            found = None if session_id is None else self._sessions.find(session_id)
        except (RollbookError, WireError) as error:
            return web.json_response(mcp_error(call, str(error)))
        if found is not None:
            found.touch()
        answer = await answer_mcp(call, found, self._dialect, name=self._info.name)
        if found is not None:
            await self._close_failed(found)
        return web.json_response(answer)

    async def openapi(self, _: web.Request) -> web.Response:
        schema = self._dialect.schema()
        paths: dict[str, Any] = {
            path: {method: {"summary": summary, "responses": {"200": {"description": "Success"}}}}
            for method, path, summary in ROUTES
        }
        return web.json_response(
            {
                "openapi": "3.1.0",
                "info": {"title": self._info.name, "version": PROTOCOL_VERSION, "description": self._info.description},
                "paths": paths,
                "components": {"schemas": dict(schema)},
            }
        )


async def _receive(socket: web.WebSocketResponse, inbox: asyncio.Queue[str | bytes]) -> None:
    """Takes: frames. Gives: strings to the inbox. Ends: when the client closes, dies, or sends another kind of frame."""
    async for message in socket:
        if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return
        await inbox.put(message.data)


async def _report_end(session: Session, socket: web.WebSocketResponse, ended: asyncio.Event) -> None:
    """Waits: until the server closes the session (idle, stop). Gives: the reason, to the client."""
    await ended.wait()
    await _send(socket, error_message(SessionEndedError(f"this session was closed: {session.end_reason}")))


async def _send(socket: web.WebSocketResponse, text: str) -> bool:
    """False if the client is gone."""
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):
        return False
    return True


async def _json_object(request: web.Request) -> Mapping[str, Any]:
    body = await request.read()
    try:
        return json_decoder(dict[str, Any]).decode_body(body or b"{}")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(ErrorCode.VALIDATION_ERROR, f"the body must be a JSON object: {error}") from error
