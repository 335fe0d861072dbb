"""A client of an OpenEnv server over a plain WebSocket: one session, one environment. Satisfies `Environment`.

    async with open_session("http://localhost:8000") as environment:
        seen = await environment.reset({"secret": 7, "low": 0, "high": 15})
        seen = await environment.step("7")

It imports nothing heavy, and it speaks to servers of the `openenv` package as well. A lost connection, a dead environment and a
late
answer are `EpisodeError`s: the episode is given up and never scored.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    TCPConnector,
    WSMsgType,
    WSServerHandshakeError,
)

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.envs.server.protocol import (
    ACTION_FIELD,
    SOCKET_PATH,
    ErrorCode,
    Reply,
    ReplyKind,
    Verb,
    WireError,
    encode,
    observation_of,
    read_reply,
)


class ServerFullError(TransientError):
    """The server has no place now. `capacity` is how many it has, where it said so."""

    def __init__(self, message: str, *, capacity: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return (_revive_full, (str(self), self.capacity, self.retry_after_s))


def _revive_full(message: str, capacity: int | None, retry_after_s: float | None) -> ServerFullError:
    return ServerFullError(message, capacity=capacity, retry_after_s=retry_after_s)


class SessionLostError(EpisodeError):
    """The session is gone or out of step; its episode cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How to speak to a server. The names of fields matter for servers that are not ours."""

    connect_s: float = 60.0
    """The whole connect, waits for a place included."""
    request_s: float = 180.0
    """The longest wait for one answer. Above the server's own budgets, so that its explanation arrives."""
    close_s: float = 10.0
    """The longest goodbye."""
    max_message_bytes: int = 64 * 1024 * 1024
    action_field: str = ACTION_FIELD
    """The name of the text in an action; an echo server calls it `message`."""
    task_field: str | None = "task"
    """The name a task is sent under; None sends the fields of the row themselves."""
    token: str | None = field(default=None, repr=False)


DEFAULTS = ClientOptions()


def new_http(options: ClientOptions = DEFAULTS) -> ClientSession:
    """The connections of a client or of a pool."""
    headers = {} if options.token is None else {"Authorization": f"Bearer {options.token}"}
    # No limit: how many there are is decided by who asks for sessions, and a hidden queue here would be a wait nobody can see.
    return ClientSession(connector=TCPConnector(limit=0), headers=headers, timeout=ClientTimeout(total=None))


@asynccontextmanager
async def open_session(url: str, options: ClientOptions = DEFAULTS) -> AsyncIterator["EnvSession"]:
    """A session with an environment of its own, closed at the end. A full server is asked again until `connect_s` is over."""
    async with new_http(options) as http:
        deadline = Deadline(options.connect_s, f"connecting to {url}")
        session = await retry(
            lambda: connect(http, url, options, deadline=deadline), on=ServerFullError, deadline=deadline
        )
        try:
            yield session
        finally:
            await session.close()


async def connect(
    http: ClientSession,
    url: str,
    options: ClientOptions = DEFAULTS,
    *,
    deadline: Deadline,
    ticket: str | None = None,
) -> "EnvSession":
    """One session that has answered once: a server may accept a connection first and refuse it then.

    Raises `ServerFullError` when there is no place, `TransientError` when there is no server, `RunError` when it is no such server.
    """
    address = f"{url.rstrip('/')}{SOCKET_PATH}"
    params = {} if ticket is None else {"ticket": ticket}
    try:
        async with deadline.limit(f"opening {address}"):
            socket = await http.ws_connect(
                address,
                params=params,
                max_msg_size=options.max_message_bytes,
                timeout=ClientWSTimeout(ws_close=options.close_s),
                compress=0,
            )
    except WSServerHandshakeError as error:
        raise _refused(address, error) from error
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError) as error:
        raise TransientError(f"no connection to {address}: {error}; is the server running?") from error
    session = EnvSession(socket, address, options)
    try:
        async with deadline.limit(f"the first answer of {address}"):
            await session.state()
    except DeadlineExceededError as error:
        await session.close()
        raise TransientError(str(error)) from error
    except BaseException:
        await session.close()
        raise
    return session


def _refused(address: str, error: WSServerHandshakeError) -> Exception:
    match error.status:
        case 503:
            advice = error.headers.get("Retry-After", "") if error.headers else ""
            return ServerFullError(
                f"{address} has no free session", retry_after_s=float(advice) if advice.isdigit() else None
            )
        case 401 | 403:
            return RunError(f"{address} refused the connection ({error.status}); give the client the server's token")
        case 410:
            return TransientError(f"{address}: the ticket of this group is no longer valid; ask for a new one")
        case _:
            return RunError(
                f"{address} answered {error.status} to a WebSocket; is this the address of an OpenEnv server?"
            )


class EnvSession:
    """One session. One call at a time; a call that is cancelled or late ends it, since its answer could be taken for the next."""

    def __init__(self, socket: ClientWebSocketResponse, address: str, options: ClientOptions) -> None:
        self._socket = socket
        self._address = address
        self._options = options
        self._lock = asyncio.Lock()
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether this session can serve no more. A new one is needed."""
        return self._lost is not None or self._socket.closed

    async def reset(self, task: Mapping[str, Any], *, episode_id: str | None = None) -> Observation:
        name = self._options.task_field
        data: dict[str, Any] = dict(task) if name is None else {name: dict(task)}
        if episode_id is not None:
            data["episode_id"] = episode_id
        return self._observation(await self._ask(Verb.RESET, data))

    async def step(self, action: str | Mapping[str, Any]) -> Observation:
        """One step. A text goes under `action_field`; an object is sent as it is."""
        data = {self._options.action_field: action} if isinstance(action, str) else dict(action)
        return self._observation(await self._ask(Verb.STEP, data))

    async def state(self) -> dict[str, Any]:
        return (await self._ask(Verb.STATE)).data

    async def close(self) -> None:
        """Say goodbye and wait until the server has tidied up, for at most `close_s`. Never raises, and twice does no harm."""
        was_lost, self._lost = self._lost is not None, self._lost or "it was closed here"
        if self._socket.closed:
            return
        with suppress(TimeoutError, ClientError, ConnectionError, WireError):
            if not was_lost:
                async with asyncio.timeout(self._options.close_s):
                    await self._socket.send_str(encode(Verb.CLOSE))
                    # The server closes its end once the place is free again: then somebody may connect at once.
                    while (await self._socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                        pass
        with suppress(ClientError, ConnectionError):
            await self._socket.close()

    async def _ask(self, verb: Verb, data: Mapping[str, Any] | None = None) -> Reply:
        async with self._lock:
            if self._lost is not None:
                raise SessionLostError(f"{verb}: the session with {self._address} is over ({self._lost})")
            finished = False
            try:
                async with asyncio.timeout(self._options.request_s):
                    await self._socket.send_str(encode(verb, data))
                    message = await self._socket.receive()
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    raise SessionLostError(f"{verb}: {self._address} closed the connection; this episode is given up")
                reply = read_reply(message.data)
                finished = True
            except TimeoutError:
                late = f"no answer within {self._options.request_s:g} s"
                raise SessionLostError(f"{verb}: {late} from {self._address}; this episode is given up") from None
            except (ClientError, ConnectionError) as error:
                raise SessionLostError(f"{verb}: the connection to {self._address} broke: {error}") from error
            except WireError as error:
                raise EpisodeError(f"{verb}: {self._address}: {error}") from error
            finally:
                if not finished:
                    self._lost = f"{verb} was not answered"
        if reply.kind is ReplyKind.ERROR:
            raise self._told(verb, reply.data)
        return reply

    def _told(self, verb: Verb, data: Mapping[str, Any]) -> Exception:
        code, message = (
            data.get("code"),
            f"{verb}: {self._address} says: {data.get('message', 'nothing')} ({data.get('code')})",
        )
        if code == ErrorCode.CAPACITY_REACHED:
            self._lost = "the server is full"
            capacity = data.get("max_sessions")
            return ServerFullError(message, capacity=capacity if isinstance(capacity, int) else None)
        if code in (ErrorCode.SESSION_ERROR, ErrorCode.FACTORY_ERROR):
            self._lost = str(data.get("message"))
            return SessionLostError(message)
        return EpisodeError(message)

    def _observation(self, reply: Reply) -> Observation:
        try:
            return observation_of(reply.data)
        except WireError as error:
            raise EpisodeError(f"{self._address}: {error}") from error
