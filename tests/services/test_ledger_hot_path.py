"""The busiest requests are read without a framework, and nobody can tell: the same answers, bounds and doors."""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.group import GroupState
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import add_atropos
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Keys, Role
from rollbook.ledger.http.bodies import BodyReader
from rollbook.ledger.http.fast_path import HOT_ROUTES, MOST_AHEAD, answering
from rollbook.ledger.http.handlers import build_app
from rollbook.ledger.serve import BACKLOG, listening_socket
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.http import submission

CONFIG = LedgerConfig(max_body_mb=0.5, max_receiving_mb=0.6, body_s=1.0)
TOKEN = "producer-token-of-some-length"
ODD = "X-Odd: 1\r\n"
"""A header that sends a request to aiohttp."""


@dataclass
class Server:
    port: int
    ledger: Ledger
    bodies: BodyReader
    app: web.Application
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> "Connection":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return Connection(reader, writer)

    async def ask(self, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = await self.connect()
        for piece in pieces:
            connection.writer.write(piece)
            await asyncio.sleep(0.01)
        answer = await connection.answer()
        connection.writer.close()
        return answer

    async def until_receiving(self, least: int) -> None:
        """Until so many bytes are on their way in; for 0, until none is."""
        async with asyncio.timeout(30):
            while self.bodies.receiving_bytes < least or (not least and self.bodies.receiving_bytes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def queued(self) -> int:
        return (await self.ledger.status(RUN)).by_state[GroupState.QUEUED]


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["Content-Length"]))
        return int(head[0].split()[1]), headers, body


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async for found in serve(tmp_path, None):
        yield found


async def serve(directory: Path, keys: Keys | None) -> AsyncIterator[Server]:
    log, clock = EventLog("ledger", echo=sys.stdout), SystemClock()
    async with open_sqlite_store(directory) as store, open_ledger(store, CONFIG, clock=clock, log=log) as ledger:
        await ledger.create_run(RUN, settings())
        app = build_app(ledger, CONFIG, keys=keys)
        add_atropos(app, store=store, config=AtroposConfig(body_s=1.0), limits=CONFIG, clock=clock, log=log)
        with listening_socket("127.0.0.1", 0) as sock:
            async with answering(app, sock.dup(), drain_s=5, backlog=BACKLOG):
                server = Server(sock.getsockname()[1], ledger, app[HOT_ROUTES].bodies, app)
                yield server
            for writer in server.writers:
                writer.close()


def request(path: str, body: bytes, kind: str, more: str = "", *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: ledger\r\nContent-Type: {kind}\r\n{more}Content-Length: {size}\r\n\r\n"
    return head.encode() + body


def submit(task: str, more: str = "", *, raw: bytes | None = None, run: str = RUN, **changes: Any) -> bytes:
    body = msgspec.msgpack.encode(submission(task, **changes)) if raw is None else raw
    return request(f"/v1/runs/{run}/submit", body, wire.CONTENT_TYPE, more)


def scored(tokens: int = 4, **changes: Any) -> bytes:
    row = list(range(tokens))
    return json.dumps({"tokens": [row, row], "masks": [row, row], "scores": [1.0, 0.0], **changes}).encode()


def post(body: bytes, more: str = "") -> bytes:
    return request("/scored_data", body, "application/json", more)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"run": "nobody"}, 404),
        ({"raw": b"\xc1"}, 400),
        ({"raw": b""}, 400),
        ({"raw": b"\x80"}, 422),
        ({"payload_digest": "0" * 32}, 422),
        ({"draw": -1}, 422),
        ({"payload": b"no frame"}, 422),
        ({"raw": b"x" * 600_000}, 413),
    ],
)
async def test_a_submission_is_answered_as_aiohttp_would(server: Server, changes: Any, status: int) -> None:
    changes = dict(changes)
    hot = await server.ask(submit("hot", **changes))
    odd = await server.ask(submit("odd", ODD, **changes))
    assert hot[0] == odd[0] == status
    assert hot[1]["Content-Type"].partition(";")[0] == odd[1]["Content-Type"].partition(";")[0]
    assert hot[2].replace(b"hot", b"odd") == odd[2] or status == 422


@pytest.mark.parametrize(
    ("body", "more", "status"),
    [
        (scored(), "", 200),
        (gzip.compress(scored(), mtime=0), "Content-Encoding: gzip\r\n", 200),
        (gzip.compress(scored(400), mtime=0)[:-60], "Content-Encoding: gzip\r\n", 400),
        (b"no gzip at all", "Content-Encoding: gzip\r\n", 400),
        (b"", "Content-Encoding: gzip\r\n", 422),
        (gzip.compress(scored() + b" " * 600_000, mtime=0), "Content-Encoding: gzip\r\n", 413),
        (b"{", "", 422),
        (b"", "", 422),
        (scored(scores=[float("nan"), 0.0]), "", 422),
        (scored(masks=[[1], [1]]), "", 422),
        (scored(tokens=4, tokens_are_lax=True), "", 200),
    ],
)
async def test_a_post_is_answered_as_aiohttp_would(server: Server, body: bytes, more: str, status: int) -> None:
    hot = await server.ask(post(body, more))
    odd = await server.ask(post(body, more + ODD))
    assert (hot[0], hot[2]) == (odd[0], odd[2]) or (status in (400, 413) and 400 <= odd[0] < 500)
    assert hot[0] == status
    if hot[0] == odd[0]:
        assert hot[1]["Content-Type"].partition(";")[0] == odd[1]["Content-Type"].partition(";")[0]


async def test_a_request_in_pieces_is_read_like_a_whole_one(server: Server) -> None:
    whole = submit("pieces")
    head = whole.index(b"\r\n\r\n") + 4
    for cut in (1, head // 2, head - 2, head, head + 5, len(whole) - 1):
        status, _, _ = await server.ask(whole[:cut], whole[cut:])
        assert status == 200
    assert await server.queued() == 1


async def test_requests_sent_without_waiting_are_answered_in_order(server: Server) -> None:
    connection = await server.connect()
    health = b"GET /health HTTP/1.1\r\nHost: ledger\r\n\r\n"
    connection.writer.write(submit("a") + submit("b") + health + submit("c") + submit("d", ODD) + submit("e"))
    found = [await connection.answer() for _ in range(6)]
    assert [status for status, _, _ in found] == [200] * 6
    assert b'"ok"' in found[2][2]
    assert await server.queued() == 5


async def test_a_client_that_sends_far_ahead_is_not_read_further_and_loses_nothing(server: Server) -> None:
    connection = await server.connect()
    bodies = [submit(f"t{n}") for n in range(300)]
    assert sum(map(len, bodies)) > MOST_AHEAD / 2
    connection.writer.write(b"".join(bodies))
    for _ in bodies:
        assert (await connection.answer())[0] == 200
    assert await server.queued() == 300


async def test_a_body_that_does_not_arrive_is_given_up_and_counts_no_longer(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(request(f"/v1/runs/{RUN}/submit", b"begin", wire.CONTENT_TYPE, length=1000))
    status, headers, body = await connection.answer()
    assert (status, headers["Connection"]) == (408, "close")
    assert b"did not arrive within 1 s" in body
    assert await connection.reader.read() == b""
    assert server.bodies.receiving_bytes == 0


async def test_a_post_that_does_not_arrive_is_asked_to_come_again(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(request("/scored_data", b"begin", "application/json", length=1000))
    assert (await connection.answer())[0] == 503
    assert server.bodies.receiving_bytes == 0


async def test_bodies_under_way_are_bounded_together_in_both_dialects(server: Server) -> None:
    holding = await server.connect()
    holding.writer.write(request("/scored_data", b"begin", "application/json", length=400_000))
    await server.until_receiving(400_000)
    big = b"x" * 300_000
    for asked in (submit("big", raw=big), post(big), post(big, ODD)):
        connection = await server.connect()
        connection.writer.write(asked[:1000])
        status, headers, _ = await connection.answer()
        assert (status, headers["Retry-After"]) == (503, "1")
        connection.writer.close()
    holding.writer.close()
    await server.until_receiving(0)
    assert (await server.ask(submit("after")))[0] == 200


async def test_a_client_that_goes_away_in_the_middle_leaves_nothing_behind(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(submit("gone")[:-10])
    await server.until_receiving(1)
    connection.writer.transport.abort()
    await server.until_receiving(0)
    assert await server.queued() == 0


async def test_tokens_are_asked_for(tmp_path: Path) -> None:
    keys = Keys({role: [TOKEN if role is Role.PRODUCER else f"{role}-token-of-some-length"] for role in Role})
    async for server in serve(tmp_path, keys):
        assert (await server.ask(submit("none")))[0] == 401
        assert (await server.ask(submit("wrong", "Authorization: Bearer no-such-token-at-all\r\n")))[0] == 401
        assert (await server.ask(submit("role", "Authorization: Bearer viewer-token-of-some-length\r\n")))[0] == 403
        assert (await server.ask(submit("good", f"Authorization: Bearer {TOKEN}\r\n")))[0] == 200
        assert await server.queued() == 1
        # A dialect that knows no tokens is left to the door that aiohttp has before it.
        server.app[HOT_ROUTES].keep_native()
        assert server.app[HOT_ROUTES].recognise(post(scored())) is None
        assert server.app[HOT_ROUTES].recognise(submit("x")) is not None


async def test_a_submission_under_way_is_answered_before_the_server_ends(tmp_path: Path) -> None:
    async for server in serve(tmp_path, None):
        connection = await server.connect()
        whole = submit("last")
        connection.writer.write(whole[:-5])
        await server.until_receiving(1)
        asyncio.get_running_loop().call_later(0.2, connection.writer.write, whole[-5:])
        answered = asyncio.create_task(connection.answer())
    assert (await answered)[0] == 200


async def test_only_what_is_plain_is_recognised(server: Server) -> None:
    recognise = server.app[HOT_ROUTES].recognise
    plain = submit("x")
    assert recognise(plain) is not None
    for odd in (
        plain.replace(b"HTTP/1.1", b"HTTP/1.0"),
        plain.replace(b"POST", b"PUT"),
        plain.replace(b"/submit", b"/submit?x=1"),
        plain.replace(b"/submit", b"/open"),
        plain.replace(b"/runs/", b"/runs/a%2F"),
        plain.replace(b"Content-Length", b"Content-Size"),
        plain.replace(b"Host: ledger", b"Transfer-Encoding: chunked"),
        plain.replace(b"Host: ledger", b"Expect: 100-continue"),
        plain.replace(b"Host: ledger", b"Connection: close"),
        plain.replace(b"Host: ledger", b"Content-Length: 5"),
        plain.replace(b"Host: ledger", b"Content-Encoding: zstd"),
        plain.replace(b"Host: ledger", b"Accept: application/json"),
        plain.replace(b"Host: ledger", b"no header"),
    ):
        assert recognise(odd) is None, odd[:200]
    assert recognise(post(scored()).replace(b"/scored_data", b"/scored_data_list")) is None


async def test_a_head_that_was_seen_before_is_taken_with_its_own_length(server: Server) -> None:
    routes = server.app[HOT_ROUTES]
    for size in (7, 12_345, 0):
        data = request("/scored_data", b"", "application/json", length=size)
        asked = routes.recognise(data)
        assert asked is not None
        assert (asked.size, asked.begin) == (size, len(data))
    for wrong in ("12x", "-1", "", "9" * 13, "600000", "7\r\nContent-Length: 8", "7\r\ncontent-length: 8"):
        head = f"POST /scored_data HTTP/1.1\r\nHost: ledger\r\nContent-Type: application/json\r\nContent-Length: {wrong}\r\n\r\n"
        assert routes.recognise(head.encode()) is None, wrong
    assert routes.recognise(request("/scored_data", b"", "text/plain", length=7)) is None
    other = routes.recognise(request("/scored_data", b"", "application/json", "Content-Encoding: gzip\r\n", length=7))
    assert other is not None
    assert other.headers[b"content-encoding"] == b"gzip"
