"""An OpenEnv-compatible server: HTTP and WebSocket over sessions. Parse, call, reply.

    GET  /ws          one session: reset, step, state, close, mcp    503 before the upgrade when there is no place
    POST /tickets     N places at once, or a wait for them           DELETE /tickets/{id} gives back what is left of one
    GET  /health  /metadata  /schema  /state                         no environment is touched
    POST /reset  /step  /mcp                                         without a session: a first observation, and where to go

Nothing that blocks runs in the event loop: plain environments work in threads, and a dead client is noticed while its step still
runs.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import RollbookError
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.environment import EnvironmentPool
from rollbook.envs.pools.reservations import TicketId
from rollbook.envs.server.auth import error_message, refuse_strangers, tell_refusals, token_needed
from rollbook.envs.server.mcp import answer_mcp
from rollbook.envs.server.playground import mount_playground
from rollbook.envs.server.protocol import (
    HEALTH_PATH,
    SOCKET_PATH,
    TICKETS_PATH,
    Dialect,
    EpisodeState,
    ErrorCode,
    ReplyKind,
    Request,
    TextDialect,
    Verb,
    WireError,
    encode,
    encode_body,
    episode_id_of,
    read_request,
    result_data,
)
from rollbook.envs.server.sessions import Session, SessionEndedError, SessionKeeper
from rollbook.telemetry.events import EventLog

# A client sends one message and waits for its answer; a few more may lie in the pipe of an eager one.
INBOX_SIZE = 8
# For the client's half of the closing handshake. Its place is free already; a client that does not read is not waited for.
GOODBYE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """What the server says about the environment behind it, without touching one."""

    name: str
    description: str = ""
    version: str | None = None


class TicketRequest(msgspec.Struct, forbid_unknown_fields=True):
    sessions: int
    wait_s: float = 0.0


def build_app(
    pool: EnvironmentPool,
    config: EnvServerConfig,
    *,
    info: EnvironmentInfo,
    dialect: Dialect | None = None,
    clock: Clock | None = None,
    log: EventLog | None = None,
) -> web.Application:
    """The application over a pool that is ready. Raises `RunError` for settings that cannot work together."""
    log = log or EventLog("env-server")
    keeper = SessionKeeper(pool, config, clock=clock or SystemClock(), log=log)
    server = _Server(pool, keeper, config, info=info, dialect=dialect or TextDialect(), log=log)
    app = web.Application(
        middlewares=[refuse_strangers, token_needed(config), tell_refusals], client_max_size=config.max_message_bytes
    )
    app.router.add_get(SOCKET_PATH, server.socket)
    app.router.add_post(TICKETS_PATH, server.take_ticket)
    app.router.add_delete(TICKETS_PATH + "/{ticket}", server.drop_ticket)
    app.router.add_get(HEALTH_PATH, server.health)
    app.router.add_get("/metadata", server.metadata)
    app.router.add_get("/schema", server.schema)
    app.router.add_get("/state", server.state)
    app.router.add_post("/reset", server.reset)
    app.router.add_post("/step", server.step)
    app.router.add_post("/mcp", server.mcp)
    if config.playground:
        mount_playground(app, capacity=keeper.capacity, name=info.name)
    app.cleanup_ctx.append(server.sweeping)
    app.on_shutdown.append(server.stop)
    return app


class _Server:
    def __init__(
        self,
        pool: EnvironmentPool,
        keeper: SessionKeeper,
        config: EnvServerConfig,
        *,
        info: EnvironmentInfo,
        dialect: Dialect,
        log: EventLog,
    ) -> None:
        self._pool = pool
        self._keeper = keeper
        self._config = config
        self._info = info
        self._dialect = dialect
        self._log = log
        self._sockets: set[web.WebSocketResponse] = set()

    async def sweeping(self, _: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(self._keeper.run(), name="envs.sweep")
            yield
            sweeper.cancel()

    async def stop(self, _: web.Application) -> None:
        """End every session, so that the application can end: an open socket would hold it."""
        await self._keeper.close_all()
        closing = (
            socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops") for socket in list(self._sockets)
        )
        await asyncio.gather(*closing, return_exceptions=True)

    # --- one session over one socket ---

    async def socket(self, request: web.Request) -> web.StreamResponse:
        place = await self._keeper.take_place(request.query.get("ticket"))
        # autoclose off: the answer to a client's close is sent when its place is free again, so that it may come back at once.
        # No compression: messages are short, and deflating them costs more than a step.
        socket = web.WebSocketResponse(
            timeout=GOODBYE_S, autoclose=False, compress=False, max_msg_size=self._config.max_message_bytes
        )
        try:
            await socket.prepare(request)
        except BaseException:
            place.release()
            raise
        self._sockets.add(socket)
        try:
            try:
                session = await self._keeper.open(place)
            except RollbookError as error:
                await _send(socket, error_message(error))
                return socket
            try:
                await self._converse(session, socket)
            finally:
                await self._keeper.close(session, "the client left")
        finally:
            self._sockets.discard(socket)
            with suppress(ConnectionError, RuntimeError):
                await socket.close()
        return socket

    async def _converse(self, session: Session, socket: web.WebSocketResponse) -> None:
        """Read on while the environment works: a client that leaves or dies in the middle of a step is noticed at once."""
        inbox: asyncio.Queue[str | bytes] = asyncio.Queue(INBOX_SIZE)
        ended = asyncio.Event()
        session.on_end = ended.set
        async with asyncio.TaskGroup() as group:
            children = [
                group.create_task(self._answer(session, socket, inbox), name="envs.answer"),
                group.create_task(_listen(socket, inbox), name="envs.listen"),
                group.create_task(_until_ended(session, socket, ended), name="envs.ended"),
            ]
            await asyncio.wait(children, return_when=asyncio.FIRST_COMPLETED)
            for child in children:
                child.cancel()

    async def _answer(self, session: Session, socket: web.WebSocketResponse, inbox: asyncio.Queue[str | bytes]) -> None:
        """Takes: messages of the inbox. Gives: one answer each, in order. Ends: with `close`, or with the session."""
        while True:
            text = await inbox.get()
            session.touch()
            is_over = False
            try:
                request = read_request(text)
                if request.verb is Verb.CLOSE:
                    return
                reply = await self._reply(session, request)
            except (WireError, RollbookError) as error:
                reply, is_over = error_message(error), isinstance(error, SessionEndedError)
            if not await _send(socket, reply) or is_over:
                return

    async def _reply(self, session: Session, request: Request) -> str:
        match request.verb:
            case Verb.RESET:
                answer = await session.reset(
                    self._dialect.task_of(request.data), episode_id=episode_id_of(request.data)
                )
            case Verb.STEP:
                answer = await session.step(self._dialect.action_of(request.data))
            case Verb.MCP:
                return encode(
                    ReplyKind.MCP, await answer_mcp(request.data, session, self._dialect, name=self._info.name)
                )
            case _:
                return encode(ReplyKind.STATE, self._dialect.state(session.episode))
        return encode(ReplyKind.OBSERVATION, result_data(self._dialect, answer, with_facts=self._config.send_facts))

    # --- places for groups ---

    async def take_ticket(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=TicketRequest)
        except msgspec.MsgspecError as error:
            raise WireError(
                ErrorCode.VALIDATION_ERROR, f"a ticket is asked for as {{sessions, wait_s}}: {error}"
            ) from error
        if asked.sessions < 1:
            raise WireError(ErrorCode.VALIDATION_ERROR, f"a ticket for {asked.sessions} sessions; ask for at least one")
        wait_s = min(max(0.0, asked.wait_s), self._config.max_ticket_wait_s)
        ticket = await self._keeper.tickets.take(asked.sessions, wait_s=wait_s)
        return web.json_response({"ticket": ticket.id, "sessions": ticket.places, "hold_s": self._config.ticket_hold_s})

    async def drop_ticket(self, request: web.Request) -> web.Response:
        self._keeper.tickets.drop(TicketId(request.match_info["ticket"]))
        return web.json_response({"dropped": True})

    # --- questions that touch no environment ---

    async def health(self, _: web.Request) -> web.Response:
        state, book = self._pool.health(), self._keeper.tickets.book
        body = {
            "status": "healthy" if state.is_ready else "unhealthy",
            "capacity": self._keeper.capacity,
            "active": book.taken,
            "reserved": book.reserved,
            "waiting": book.num_waiting,
            "environments_busy": state.busy,
            "environments_replaced": state.replaced,
        }
        return web.json_response(body, status=200 if state.is_ready else 503)

    async def metadata(self, _: web.Request) -> web.Response:
        info = self._info
        body = {"name": info.name, "description": info.description or info.name, "version": info.version}
        return web.json_response({**body, "max_sessions": self._keeper.capacity})

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response(dict(self._dialect.schema()))

    async def state(self, _: web.Request) -> web.Response:
        """HTTP has no session, so there is no episode either."""
        return web.json_response(dict(self._dialect.state(EpisodeState())))

    # --- without a session ---

    async def reset(self, request: web.Request) -> web.Response:
        """The first observation of a task, in an environment that is given back at once."""
        data = await _object(request)
        session = await self._keeper.open(await self._keeper.take_place(None))
        try:
            answer = await session.reset(self._dialect.task_of(data), episode_id=episode_id_of(data))
            body = result_data(self._dialect, answer, with_facts=self._config.send_facts)
        finally:
            await self._keeper.close(session, "an HTTP reset has no session")
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
        answer = await answer_mcp(await _object(request), None, self._dialect, name=self._info.name)
        return web.json_response(answer)


async def _listen(socket: web.WebSocketResponse, inbox: asyncio.Queue[str | bytes]) -> None:
    """Takes: frames. Gives: texts to the inbox. Ends: when the client closes, dies, or sends what is not a text."""
    async for message in socket:
        if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return
        await inbox.put(message.data)


async def _until_ended(session: Session, socket: web.WebSocketResponse, ended: asyncio.Event) -> None:
    """Waits: for the keeper to end the session (idle, stop). Gives: the reason, to the client."""
    await ended.wait()
    await _send(socket, error_message(SessionEndedError(f"this session was ended: {session.end_reason}")))


async def _send(socket: web.WebSocketResponse, text: str) -> bool:
    """False when the client is gone."""
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):
        return False
    return True


async def _object(request: web.Request) -> Mapping[str, Any]:
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(ErrorCode.VALIDATION_ERROR, f"the body must be a JSON object: {error}") from error
