"""GET /inference/v1/stream: a WebSocket for clients with many requests, token ids in and out. Rollouts use it."""

import asyncio
from contextlib import suppress
from functools import partial

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.policy import Completion, TokenChunk
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.responses import error_response, response_to
from rollbook.inference.server.service import PolicyService
from rollbook.inference.wire.token_stream import (
    ClientFrame,
    ServerFrame,
    StreamedError,
    StreamedOutcome,
    StreamedRequest,
    StreamedTokens,
)

MAX_FRAME_BYTES = 64 * 2**20
MAX_SENT = 1024
"""Outcomes, and parts of streams, in one frame. More are sent in several frames."""
MAX_SENT_BYTES = 16 * 2**20
"""Routes in one frame, unless a single outcome has more."""
STARTED_AT_ONCE = 64
"""Requests of a frame that are started before other connections get their turn."""
HEARTBEAT_S = 30.0
"""A client that does not respond for half of this time is gone; its requests are cancelled."""
FRAME_INTERVAL_S = 0.002
"""Least time between two frames of a connection. Adds at most this to a turn; fewer and larger frames take less CPU time."""


class TokenStreamRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._streams: set[StreamSession] = set()

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, compress=False, heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        stream = StreamSession(self._service, socket)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
        return socket

    async def close(self, _app: web.Application) -> None:
        """Send the outcomes that are ready and close all connections, so that the server can stop."""
        await asyncio.gather(*(stream.close() for stream in list(self._streams)))


class StreamSession:
    """One connection. A request costs no task: its outcome joins the next frame when the engine has finished it."""

    def __init__(self, service: PolicyService, socket: web.WebSocketResponse) -> None:
        self._service = service
        self._socket = socket
        self._running: dict[int, asyncio.Future[Completion]] = {}
        # Never longer than the number of requests, which the engine's queue limits.
        self._outcomes: list[StreamedOutcome] = []
        # The engine limits the lengths of streamed requests.
        self._tokens: list[StreamedTokens] = []
        self._num_streamed: dict[int, int] = {}
        self._has_messages = asyncio.Event()
        self._decode = msgpack_decoder(ClientFrame).decode
        self._encode = msgspec.msgpack.Encoder().encode

    async def run(self) -> None:
        """Serve the connection until the client closes it."""
        sender = asyncio.create_task(self._send_outcomes(), name="policy.send_outcomes")
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY or not await self._receive(message.data):
                    # Before the close, which waits for the client.
                    self._cancel_requests()
                    await self._socket.close(code=WSCloseCode.INVALID_TEXT, message=b"send MessagePack frames")
                    break
        finally:
            sender.cancel()
            self._cancel_requests()

    def _cancel_requests(self) -> None:
        for future in list(self._running.values()):
            future.cancel()

    async def close(self) -> None:
        with suppress(ConnectionError):
            await self._send_ready()
            await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops")

    async def _receive(self, frame: bytes) -> bool:
        """False: the frame is invalid."""
        try:
            received = self._decode(frame)
        except msgspec.MsgspecError:
            return False
        for number, request in enumerate(received.requests, start=1):
            self._start(request)
            if number % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        for number in received.cancelled:
            if (future := self._running.get(number)) is not None:
                future.cancel()
        return True

    def _start(self, request: StreamedRequest) -> None:
        if request.id in self._running:
            error = BadRequestError(f"the id {request.id} belongs to a request that still runs", param="id")
            self._add(_failure(request.id, error))
            return
        if request.is_streamed:
            self._num_streamed[request.id] = 0
        try:
            future = self._service.submit(
                request.prompt_ids(),
                request.sampling(),
                min_publication=request.min_publication,
                on_tokens=partial(self._add_tokens, request.id) if request.is_streamed else None,
            )
        except Exception as error:
            self._num_streamed.pop(request.id, None)
            self._add(_failure(request.id, error))
        else:
            self._running[request.id] = future
            future.add_done_callback(partial(self._settle, request.id))

    def _settle(self, number: int, future: asyncio.Future[Completion]) -> None:
        del self._running[number]
        num_streamed = self._num_streamed.pop(number, 0)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._add(StreamedOutcome.of(number, future.result(), num_streamed=num_streamed))
        else:
            self._add(_failure(number, error))

    def _add(self, outcome: StreamedOutcome) -> None:
        self._outcomes.append(outcome)
        self._has_messages.set()

    def _add_tokens(self, number: int, chunk: TokenChunk) -> None:
        if number not in self._num_streamed:
            return  # it was cancelled
        self._num_streamed[number] += len(chunk.token_ids)
        self._tokens.append(StreamedTokens.of(number, chunk))
        self._has_messages.set()

    async def _send_outcomes(self) -> None:
        """Send outcomes and streamed tokens to the client.

        Takes:  outcomes of requests, as they end, and tokens of streamed requests.
        Gives:  frames with all messages since the last one. The first message after a pause is sent at once.
        Waits:  for the next message, for a client that reads slowly, and `FRAME_INTERVAL_S` after each frame.
        Ends:   on cancellation, or when the connection is lost.
        """
        with suppress(ConnectionError):
            while True:
                await self._has_messages.wait()
                await self._send_ready()
                await asyncio.sleep(FRAME_INTERVAL_S)

    async def _send_ready(self) -> None:
        outcomes, tokens = self._outcomes, self._tokens
        self._outcomes, self._tokens = [], []
        self._has_messages.clear()
        # In the order of their lists: the tokens of a request are sent before its outcome, or with it.
        while outcomes or tokens:
            sent = [] if len(tokens) > MAX_SENT else _first(outcomes)
            await self._socket.send_bytes(self._encode(ServerFrame(sent, tokens[:MAX_SENT])))
            outcomes, tokens = outcomes[len(sent) :], tokens[MAX_SENT:]
            if outcomes or tokens:
                await asyncio.sleep(0)


def _first(outcomes: list[StreamedOutcome]) -> list[StreamedOutcome]:
    """The outcomes of the next frame."""
    num_bytes = 0
    for count, outcome in enumerate(outcomes[:MAX_SENT]):
        routes = None if outcome.completion is None else outcome.completion.routes
        num_bytes += 0 if routes is None else len(routes)
        if num_bytes > MAX_SENT_BYTES and count:
            return outcomes[:count]
    return outcomes[:MAX_SENT]


def _failure(number: int, error: BaseException) -> StreamedOutcome:
    response = response_to(error) if isinstance(error, Exception) else None
    if response is None:
        response = error_response(500, "InternalServerError", f"{type(error).__name__}: {error}")
    body = response.body if isinstance(response.body, bytes) else b""
    return StreamedOutcome(number, None, StreamedError(response.status, body, response.headers.get("Retry-After")))
