"""Sends the requests of a ledger client: repeats them while the service cannot be reached, and uses its replicas in turn."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import json_decoder, msgpack_decoder
from rollbook.contracts.errors import FencedError, NotFoundError, RollbookError, RunError, TransientError
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.ledger.http import wire
from rollbook.ledger.http.compression import MIN_COMPRESSED_BYTES, compress
from rollbook.ledger.http.verb import Form, Verb
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.waits import WAITS

R = TypeVar("R")
T = TypeVar("T")
Read = Callable[[aiohttp.ClientResponse], Awaitable[T]]

REQUESTS = "the ledger to respond"
CONNECT_S = 5.0
LONG_POLL_SLACK_S = 15.0
"""How much longer than `wait_s` a long poll may take before the connection is considered dead."""
UNAVAILABLE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
"""Another replica of the service may respond."""
RETRIED = UNAVAILABLE | {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


@dataclass(frozen=True, slots=True)
class _Request:
    """An encoded request. The same bytes are sent in every attempt."""

    name: str
    """Method and path, for messages."""
    method: str
    target: str
    """Path and query; the address of the service is that of the current replica."""
    headers: Mapping[str, str]
    body: bytes | None


class Transport:
    """Requests about one run. `url`: one address, or those of several replicas separated by commas."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        run_id: RunId,
        *,
        request_s: float,
        log: EventLog,
        token: str | None,
        is_compressed: bool,
    ) -> None:
        self._session = session
        self._urls = [address.strip().rstrip("/") for address in url.split(",")]
        self._current = 0
        self.run_id = run_id
        self._request_s = request_s
        self._log = log
        self._is_compressed = is_compressed
        # Explicit, because aiohttp would offer every encoding it knows. On one machine compression costs more than it saves.
        self._headers = {"Accept": wire.CONTENT_TYPE, "Accept-Encoding": "zstd" if is_compressed else "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def url(self) -> str:
        """The address of the replica in use."""
        return self._urls[self._current]

    async def call(self, request: Verb[R]) -> R:
        """The response to a request that is repeated while the ledger cannot be reached."""
        return await self.read(request, _decode(request))

    async def read(self, request: Verb[Any], read: Read[T]) -> T:
        """Like `call`, for a response that `read` decodes."""
        encoded = await self._encode(request)
        wait_s: float = getattr(request, "wait_s", 0.0) + request.declaration.takes_s

        async def attempt(left_s: float) -> T:
            return await self._send(encoded, read, min(left_s, wait_s + self._attempt_s))

        return await self.repeat(attempt, name=encoded.name, wait_s=wait_s)

    async def call_once(self, request: Verb[R]) -> R:
        """One attempt. Raises `TransientError` if another one may succeed."""
        return await self._send(await self._encode(request), _decode(request), self._attempt_s)

    async def repeat(self, attempt: Callable[[float], Awaitable[T]], *, name: str, wait_s: float = 0.0) -> T:
        """Repeat `attempt`, which gets the seconds left, on every `TransientError` until the time for a request is over."""
        deadline = Deadline(self._request_s + wait_s, f"ledger {name}")

        def log_retry(error: Exception, wait: float) -> None:
            WAITS.failing(REQUESTS, str(error))
            self._log.warning("ledger.retry", run=self.run_id, request=name, error=str(error), wait_s=round(wait, 2))

        result = await retry(
            lambda: attempt(max(deadline.remaining_s(), 0.1)), on=TransientError, deadline=deadline, on_retry=log_retry
        )
        WAITS.recovered(REQUESTS)
        return result

    @property
    def _attempt_s(self) -> float:
        """Time limit of one attempt. Another one must have time left."""
        return max(LONG_POLL_SLACK_S, self._request_s / 2)

    async def _encode(self, request: Verb[Any]) -> _Request:
        verb = request.declaration
        if not verb.has_body:
            fields = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
            target = self._target(
                verb.path, {name: str(fields.pop(name)) for name in verb.path_fields if name in fields}
            )
            query = f"?{urlencode(fields)}" if fields else ""
            return _Request(f"{verb.method} {target}", verb.method, target + query, self._headers, None)
        target = self._target(verb.path, {})
        body = msgspec.msgpack.encode(request)
        headers = {**self._headers, "Content-Type": wire.CONTENT_TYPE}
        if self._is_compressed and len(body) >= MIN_COMPRESSED_BYTES:
            body, headers["Content-Encoding"] = await asyncio.to_thread(compress, body), "zstd"
        return _Request(f"{verb.method} {target}", verb.method, target, headers, body)

    def _target(self, path: str, values: Mapping[str, str]) -> str:
        return path.format(**{name: quote(value, safe="") for name, value in {"run": self.run_id, **values}.items()})

    async def _send(self, request: _Request, read: Read[T], limit_s: float) -> T:
        """One attempt at the current replica. Raises `TransientError` if another attempt may succeed."""
        replica = self._current
        url = self._urls[replica]
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        # Wrapped as a file: aiohttp would write large plain bytes to the socket in one go and block the event loop.
        data = None if request.body is None else io.BytesIO(request.body)
        try:
            async with self._session.request(
                request.method, url + request.target, data=data, headers=request.headers, timeout=timeout
            ) as response:
                if response.status != HTTPStatus.OK:
                    if response.status in UNAVAILABLE:
                        self._fail_over(replica)
                    raise await _response_error(response, request.name)
                return await read(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, EOFError, TimeoutError) as error:
            self._fail_over(replica)
            raise TransientError(
                f"ledger at {url}: no response to {request.name} ({type(error).__name__}: {error})"
            ) from error
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            raise RunError(
                f"ledger at {url}: {request.name} has no valid response ({type(error).__name__}: {error}); check the address, "
                "and that the service has this release"
            ) from error

    def _fail_over(self, failed: int) -> None:
        """Use the next replica from now on. Requests that run concurrently fail at the same one and move on only once."""
        if len(self._urls) > 1 and self._current == failed:
            self._current = (failed + 1) % len(self._urls)
            self._log.warning(
                "ledger.failed_over", run=self.run_id, from_url=self._urls[failed], to_url=self._urls[self._current]
            )


def _decode(request: Verb[R]) -> Read[R]:
    verb = request.declaration

    async def read(response: aiohttp.ClientResponse) -> R:
        body: Any = await response.read()
        if verb.form is Form.MESSAGE:
            body = msgpack_decoder(verb.response).decode(body)
        result: R = body
        return result

    return read


async def _response_error(response: aiohttp.ClientResponse, name: str) -> RollbookError:
    raw = await response.read()
    try:
        reply = json_decoder(wire.ErrorReply).decode(raw)
    except msgspec.MsgspecError:
        reply = wire.ErrorReply(kind="", message=raw[:500].decode(errors="replace"))
    try:
        retry_after_s = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        retry_after_s = None
    return error_of(
        wire.SubmitError(status=response.status, kind=reply.kind, message=reply.message, retry_after_s=retry_after_s),
        name,
    )


def error_of(error: wire.SubmitError, name: str) -> RollbookError:
    """The class of the result says whether to retry."""
    if error.status == HTTPStatus.CONFLICT:
        return FencedError(error.message)
    if error.kind == UnusableGroupError.__name__:
        return UnusableGroupError(error.message)
    message = f"the ledger rejected {name} ({error.status}): {error.message}"
    if error.status == HTTPStatus.NOT_FOUND:
        return NotFoundError(message)
    if error.status in RETRIED:
        return TransientError(message, retry_after_s=error.retry_after_s)
    return RunError(message)
