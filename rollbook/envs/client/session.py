"""A client of an OpenEnv server over a WebSocket: one session, one environment. Satisfies `Environment`.

    async with open_session("http://localhost:8000") as env:
        seen = await env.reset({"secret": 7, "low": 0, "high": 15})
        seen = await env.step("7")

It also works with servers of the `openenv` package. A lost connection, a dead environment and a late reply raise `EpisodeError`:
the episode is dropped and never scored.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError, finish
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.task import Observation
from rollbook.envs.server.protocol import (
    ACTION_FIELD,
    RESERVATIONS_PATH,
    SOCKET_PATH,
    EnvReply,
    EnvVerb,
    ErrorCode,
    ReplyKind,
    WireError,
    encode,
    observation_of,
    read_reply,
)

T = TypeVar("T")


class ServerFullError(TransientError):
    """The server has no free session. `capacity` is its number of sessions, if it reported it."""

    def __init__(self, message: str, *, capacity: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_full, (str(self), self.capacity, self.retry_after_s))


def _unpickle_full(message: str, capacity: int | None, retry_after_s: float | None) -> ServerFullError:
    return ServerFullError(message, capacity=capacity, retry_after_s=retry_after_s)


class GroupTooLargeError(RunError):
    """The request is for more sessions than the server has. The message contains both numbers."""


class RefusedActionError(EpisodeError):
    """The server does not take this action: a value is out of its range, for example."""


class SessionLostError(EpisodeError):
    """The session is closed or its replies are out of order; its episode cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Time limits and field names. The field names matter for other OpenEnv servers."""

    connect_s: float = 60.0
    """The whole connect, including the wait for a free session."""
    request_s: float = 180.0
    """The longest wait for one reply. Longer than the server's limits, so that its error message arrives."""
    close_s: float = 10.0
    """The longest wait for the server to close the session."""
    max_message_bytes: int = 64 * 1024 * 1024
    action_field: str = ACTION_FIELD
    """The field of the text in an action; an echo server calls it `message`."""
    task_field: str | None = "task"
    """The field of the task in a reset; None sends the fields of the row themselves."""
    token: str | None = field(default=None, repr=False)


DEFAULTS = ClientOptions()
QUEUE_SHARE = 0.9
"""Share of the remaining time for the wait in a server's queue; the rest is for the connection."""


def new_http(options: ClientOptions = DEFAULTS) -> ClientSession:
    """The HTTP connections of a client or of a pool."""
    headers = {} if options.token is None else {"Authorization": f"Bearer {options.token}"}
    # No limit: the callers bound the number of sessions, and a queue inside aiohttp would be an invisible wait.
    return ClientSession(connector=TCPConnector(limit=0), headers=headers, timeout=ClientTimeout(total=None))


@asynccontextmanager
async def open_session(url: str, options: ClientOptions = DEFAULTS) -> AsyncIterator["EnvSession"]:
    """One session, closed at the end. Waits up to `connect_s` for a full server."""
    async with new_http(options) as http:
        (session,) = await open_sessions(http, url.rstrip("/"), 1, options)
        try:
            yield session
        finally:
            await session.close()


async def open_sessions(http: ClientSession, url: str, count: int, options: ClientOptions) -> list["EnvSession"]:
    """Open `count` sessions, all or none. Waits up to `connect_s` for a full server."""
    deadline = Deadline(options.connect_s, f"connecting {count} sessions to {url}")

    async def attempt() -> list[EnvSession]:
        return await open_reserved(
            http, url, count, options, deadline=deadline, wait_s=QUEUE_SHARE * deadline.remaining_s()
        )

    return await retry(attempt, on=ServerFullError, deadline=deadline)


async def open_reserved(
    http: ClientSession,
    url: str,
    count: int,
    options: ClientOptions,
    *,
    deadline: Deadline,
    wait_s: float,
    respond_s: float | None = None,
) -> list["EnvSession"]:
    """Open `count` sessions, all or none, after at most `wait_s` in the server's queue. Raises `ServerFullError` then.

    `respond_s`: a server that does not grant or refuse the reservation within this time does not respond.
    """
    reservation = await _reserve(http, url, count, deadline=deadline, wait_s=wait_s, respond_s=respond_s)
    opened: list[EnvSession] = []

    async def open_one() -> None:
        opened.append(await connect(http, url, options, deadline=deadline, reservation=reservation))

    try:
        await all_or_first_error([open_one() for _ in range(count)])
    except BaseException as error:
        await close_sessions(opened, options)
        if reservation is not None:
            # If this fails, the server cancels the reservation when its hold time is over.
            cancel = _cancel_reservation(http, f"{url}{RESERVATIONS_PATH}/{reservation}")
            await finish(cancel, within_s=options.close_s, name="cancelling a reservation")
        if isinstance(error, ServerFullError) and error.capacity is not None and error.capacity < count:
            raise GroupTooLargeError(
                f"{url}: {count} sessions were requested, but this server has {error.capacity}; "
                f"request at most {error.capacity}, or start the server with a pool of at least {count}"
            ) from error
        raise
    return opened


async def close_sessions(sessions: Sequence["EnvSession"], options: ClientOptions) -> None:
    async def close() -> None:
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)

    # Each close has its own limit; twice that bounds all of them together.
    await finish(close(), within_s=2 * options.close_s, name="closing sessions")


async def all_or_first_error(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. On the first error the other calls are cancelled, and the error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        first = next((error for error in failed if error is not None), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if first is not None:
        raise first
    return [task.result() for task in tasks]


async def _reserve(
    http: ClientSession, url: str, count: int, *, deadline: Deadline, wait_s: float, respond_s: float | None
) -> str | None:
    """A reservation of `count` sessions, after waiting in the server's queue; None if the server has no reservations."""
    try:
        async with (
            deadline.limit(f"reserving {count} sessions at {url}", at_most_s=respond_s),
            http.post(f"{url}{RESERVATIONS_PATH}", json={"sessions": count, "wait_s": wait_s}) as reply,
        ):
            if reply.status in (404, 405):
                return None
            body = await reply.json(content_type=None)
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError, ValueError) as error:
        raise TransientError(f"no reservation from {url}: {error}; is the server running?") from error
    if reply.status == 200:
        return str(body["reservation"])
    message = body.get("data", {}).get("message", body) if isinstance(body, Mapping) else body
    if reply.status == 409:
        raise GroupTooLargeError(f"{url}: {message}")
    if reply.status == 503:
        raise ServerFullError(f"{url}: {message}")
    raise RunError(f"{url} replied {reply.status} to a request for {count} sessions: {message}")


async def _cancel_reservation(http: ClientSession, address: str) -> None:
    async with http.delete(address):
        pass


async def connect(
    http: ClientSession,
    url: str,
    options: ClientOptions = DEFAULTS,
    *,
    deadline: Deadline,
    reservation: str | None = None,
) -> "EnvSession":
    """One session that has replied once, since a server may accept a connection first and refuse it then.

    Raises `ServerFullError` if no session is free, `TransientError` if there is no server, `RunError` if it is not an OpenEnv
    server.
    """
    address = f"{url.rstrip('/')}{SOCKET_PATH}"
    params = {} if reservation is None else {"reservation": reservation}
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
        raise _handshake_error(address, error) from error
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError) as error:
        raise TransientError(f"no connection to {address}: {error}; is the server running?") from error
    session = EnvSession(socket, address, options)
    try:
        async with deadline.limit(f"the first reply of {address}"):
            await session.state()
    except DeadlineExceededError as error:
        await session.close()
        raise TransientError(str(error)) from error
    except BaseException:
        await session.close()
        raise
    return session


def _handshake_error(address: str, error: WSServerHandshakeError) -> Exception:
    match error.status:
        case 503:
            retry_after = error.headers.get("Retry-After", "") if error.headers else ""
            return ServerFullError(
                f"{address} has no free session", retry_after_s=float(retry_after) if retry_after.isdecimal() else None
            )
        case 401 | 403:
            return RunError(f"{address} refused the connection ({error.status}); set the server's token in the client")
        case 410:
            return TransientError(f"{address}: the reservation is no longer valid; request a new one")
        case _:
            return RunError(
                f"{address} replied {error.status} to a WebSocket; is this the address of an OpenEnv server?"
            )


class EnvSession:
    """One session. Calls are sequential. A cancelled or late call closes it, since its reply could be taken for the next one's."""

    def __init__(self, socket: ClientWebSocketResponse, address: str, options: ClientOptions) -> None:
        self._socket = socket
        self._address = address
        self._options = options
        self._lock = asyncio.Lock()
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether this session is unusable and must be replaced."""
        return self._lost is not None or self._socket.closed

    async def reset(self, task: Mapping[str, Any], *, episode_id: str | None = None) -> Observation:
        name = self._options.task_field
        data: dict[str, Any] = dict(task) if name is None else {name: dict(task)}
        if episode_id is not None:
            data["episode_id"] = episode_id
        return self._observation(await self._request(EnvVerb.RESET, data))

    async def step(self, action: str | Mapping[str, Any]) -> Observation:
        """One step. A string is sent in `action_field`; a mapping is sent unchanged."""
        data = {self._options.action_field: action} if isinstance(action, str) else dict(action)
        return self._observation(await self._request(EnvVerb.STEP, data))

    async def state(self) -> dict[str, Any]:
        return (await self._request(EnvVerb.STATE)).data

    async def close(self) -> None:
        """Close the session and wait up to `close_s` for the server to free it. Never raises; a second call does nothing."""
        was_lost, self._lost = self._lost is not None, self._lost or "it was closed here"
        if self._socket.closed:
            return
        with suppress(TimeoutError, ClientError, ConnectionError, WireError):
            if not was_lost:
                async with asyncio.timeout(self._options.close_s):
                    await self._socket.send_str(encode(EnvVerb.CLOSE))
                    # The server closes its side once the slot is free, so the next connect succeeds.
                    while (await self._socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                        pass
        with suppress(ClientError, ConnectionError):
            await self._socket.close()

    async def _request(self, verb: EnvVerb, data: Mapping[str, Any] | None = None) -> EnvReply:
        async with self._lock:
            if self._lost is not None:
                raise SessionLostError(f"{verb}: the session with {self._address} is closed ({self._lost})")
            finished = False
            try:
                async with asyncio.timeout(self._options.request_s):
                    await self._socket.send_str(encode(verb, data))
                    message = await self._socket.receive()
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    raise SessionLostError(f"{verb}: {self._address} closed the connection; this episode is dropped")
                reply = read_reply(message.data)
                finished = True
            except TimeoutError:
                limit = f"no reply within {self._options.request_s:g} s"
                raise SessionLostError(f"{verb}: {limit} from {self._address}; this episode is dropped") from None
            except (ClientError, ConnectionError) as error:
                raise SessionLostError(f"{verb}: the connection to {self._address} broke: {error}") from error
            except WireError as error:
                raise EpisodeError(f"{verb}: {self._address}: {error}") from error
            finally:
                if not finished:
                    self._lost = f"{verb} got no reply"
        if reply.kind is ReplyKind.ERROR:
            raise self._error(verb, reply.data)
        return reply

    def _error(self, verb: EnvVerb, data: Mapping[str, Any]) -> Exception:
        code = data.get("code")
        message = f"{verb}: {self._address} reports: {data.get('message', 'nothing')} ({code})"
        if code == ErrorCode.CAPACITY_REACHED:
            self._lost = "the server is full"
            capacity = data.get("max_sessions")
            return ServerFullError(message, capacity=capacity if isinstance(capacity, int) else None)
        if code in (ErrorCode.SESSION_ERROR, ErrorCode.FACTORY_ERROR):
            self._lost = str(data.get("message"))
            return SessionLostError(message)
        if code == ErrorCode.VALIDATION_ERROR and verb is EnvVerb.STEP:
            return RefusedActionError(message)
        return EpisodeError(message)

    def _observation(self, reply: EnvReply) -> Observation:
        try:
            return observation_of(reply.data)
        except WireError as error:
            raise EpisodeError(f"{self._address}: {error}") from error
