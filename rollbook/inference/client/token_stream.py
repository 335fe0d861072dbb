"""One WebSocket to a policy server for all requests of this process. See `wire/token_stream.py`."""

import asyncio
import itertools
from contextlib import suppress

import aiohttp
import msgspec

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, OnTokens, SamplingParams, TokenChunk
from rollbook.inference.connection import PolicyConnection, error_of
from rollbook.inference.wire.token_stream import (
    STREAM_PATH,
    ClientFrame,
    ServerFrame,
    StreamedOutcome,
    StreamedRequest,
    StreamMismatchError,
)

SETTLED_AT_ONCE = 32
"""Outcomes of a frame whose requests continue before the event loop does something else. An episode takes about 0.25 ms until its
next request, and a frame of a server with thousands of requests has hundreds of outcomes."""


class TokenStream:
    """Connects with the first request, and again after the connection was lost. Requests in flight then fail as transient."""

    def __init__(self, connection: PolicyConnection) -> None:
        self._connection = connection
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._connecting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._on_tokens: dict[int, OnTokens] = {}
        self._received: dict[int, list[TokenChunk]] = {}
        self._requests: list[StreamedRequest] = []
        self._cancelled: list[int] = []
        self._has_messages = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgpack_decoder(ServerFrame).decode

    async def complete(
        self, prompt: list[int], sampling: SamplingParams, *, min_publication: int, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Raises the errors of `connection.error_of`. Cancelling it cancels the request at the server."""
        if self._socket is None or self._socket.closed:
            await self._connect()
        number = next(self._numbers)
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[number] = completion
        if on_tokens is not None:
            self._on_tokens[number] = on_tokens
            self._received[number] = []
        self._requests.append(
            StreamedRequest.of(
                number, prompt, sampling, min_publication=min_publication, is_streamed=on_tokens is not None
            )
        )
        self._has_messages.set()
        try:
            return await completion
        finally:
            self._on_tokens.pop(number, None)
            self._received.pop(number, None)
            if self._pending.pop(number, None) is not None:
                self._cancelled.append(number)
                self._has_messages.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        self._fail_pending("the client was closed")

    async def _connect(self) -> None:
        async with self._connecting:
            if self._socket is not None and not self._socket.closed:
                return
            for task in self._tasks:
                task.cancel()
            self._fail_pending("the connection was lost")
            self._socket = socket = await self._connection.open_websocket(STREAM_PATH)
            self._tasks = [
                asyncio.create_task(self._send(socket), name="policy.send_requests"),
                asyncio.create_task(self._receive(socket), name="policy.receive_completions"),
            ]

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send requests and cancellations.

        Takes:  messages of `complete`.
        Gives:  frames with all messages since the last one.
        Waits:  for the next message, and for a server that reads slowly.
        Ends:   on cancellation, or when the connection is lost; `_receive` reports that.
        """
        with suppress(ConnectionError):
            while True:
                await self._has_messages.wait()
                self._has_messages.clear()
                frame = ClientFrame(self._requests, self._cancelled)
                self._requests, self._cancelled = [], []
                await socket.send_bytes(self._encode(frame))

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Receive outcomes and streamed tokens.

        Takes:  frames of the server.
        Gives:  each of them to its request.
        Waits:  for the next frame.
        Ends:   when the connection is closed or a frame is invalid: all requests in flight fail as transient.
        """
        cause = "the connection was lost"
        async for message in socket:
            try:
                frame = self._decode(message.data)
                streamed = [(tokens.id, tokens.to_contract()) for tokens in frame.tokens]
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                cause = f"invalid frame: {error}"
                break
            for number, chunk in streamed:
                self._stream(number, chunk)
            for count, outcome in enumerate(frame.outcomes, start=1):
                self._settle(outcome)
                if count % SETTLED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        await socket.close()
        self._fail_pending(cause)

    def _stream(self, number: int, chunk: TokenChunk) -> None:
        on_tokens, completion = self._on_tokens.get(number), self._pending.get(number)
        if on_tokens is None or completion is None or completion.done():
            return
        self._received[number].append(chunk)
        try:
            on_tokens(chunk)
        except Exception as error:
            # The caller's code: its error ends its own request, which is then cancelled at the server.
            completion.set_exception(error)

    def _settle(self, outcome: StreamedOutcome) -> None:
        completion = self._pending.pop(outcome.id, None)
        if completion is None or completion.done():
            return
        url = self._connection.url
        if outcome.error is not None:
            error = outcome.error
            completion.set_exception(error_of(error.status, error.body, error.retry_after, where=url + STREAM_PATH))
        elif outcome.completion is not None:
            try:
                completion.set_result(outcome.joined(self._received.get(outcome.id, ())))
            except StreamMismatchError as error:
                completion.set_exception(error)
            except ValueError as error:
                completion.set_exception(TransientError(f"invalid response of {url}: {error}"))

    def _fail_pending(self, cause: str) -> None:
        pending, self._pending = self._pending, {}
        self._requests, self._cancelled = [], []
        for completion in pending.values():
            if not completion.done():
                completion.set_exception(TransientError(f"{self._connection.url}{STREAM_PATH} is unreachable: {cause}"))
