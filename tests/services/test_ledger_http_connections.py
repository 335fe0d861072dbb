"""Raw HTTP connections: split, pipelined, slow, aborted and smuggled requests, to the native API and to Atropos."""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.group import GroupState
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.client.transport import RETRIED
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.http.bodies import BodyReader
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.service import Ledger
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.http import submission

CONFIG = LedgerConfig(max_body_mb=0.5, max_receiving_mb=0.6, body_s=1.0)
PACKET_GAP_S = 0.01
"""Long enough that the server reads the pieces of a request one by one."""


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(PACKET_GAP_S)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["Content-Length"]))
        return int(head[0].split()[1]), headers, body


@dataclass
class Server:
    port: int
    ledger: Ledger
    bodies: BodyReader
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return Connection(reader, writer)

    async def request(self, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = await self.connect()
        await connection.send(*pieces)
        response = await connection.response()
        connection.writer.close()
        return response

    async def until_receiving(self, least: int) -> None:
        """Wait until at least so many bytes are in transit; for 0, until none are."""
        async with asyncio.timeout(30):
            while self.bodies.receiving_bytes < least or (not least and self.bodies.receiving_bytes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def num_queued(self) -> int:
        return (await self.ledger.status(RUN)).by_state[GroupState.QUEUED]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Server]:
    log, dialect = EventLog("ledger", echo=sys.stdout), atropos_dialect(AtroposConfig(body_s=1.0))
    async with open_ledger_service(sqlite_url(directory), CONFIG, log=log, dialects=[dialect]) as service:
        await service.ledger.create_run(RUN, settings())
        with listening_socket("127.0.0.1", 0) as sock:
            server = Server(sock.getsockname()[1], service.ledger, service.bodies)
            async with service.serving(sock.dup(), drain_s=5):
                yield server
            for writer in server.writers:
                writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as found:
        yield found


def request(path: str, body: bytes, kind: str, more: str = "", *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{more}Content-Length: {size}\r\n\r\n"
    return head.encode() + body


def submit(task: str, *, raw: bytes | None = None, run: str = RUN, **changes: Any) -> bytes:
    body = msgspec.msgpack.encode(submission(task, **changes)) if raw is None else raw
    return request(f"/v1/runs/{run}/submit", body, wire.CONTENT_TYPE)


def scored(tokens: int = 4, **changes: Any) -> bytes:
    row = list(range(tokens))
    return json.dumps({"tokens": [row, row], "masks": [row, row], "scores": [1.0, 0.0], **changes}).encode()


def post(body: bytes, more: str = "") -> bytes:
    return request("/scored_data", body, "application/json", more)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"run": "unknown"}, 404),
        ({"raw": b"\xc1"}, 400),
        ({"raw": b""}, 400),
        ({"raw": b"\x80"}, 422),
        ({"attempt": -1}, 422),
        ({"raw": b"x" * 600_000}, 413),
    ],
)
async def test_a_submission_has_the_status_of_its_error(server: Server, changes: Any, status: int) -> None:
    assert (await server.request(submit("a", **changes)))[0] == status


@pytest.mark.parametrize(
    ("body", "more", "status"),
    [
        (scored(), "", 200),
        (gzip.compress(scored(), mtime=0), "Content-Encoding: gzip\r\n", 200),
        (gzip.compress(scored(400), mtime=0)[:-60], "Content-Encoding: gzip\r\n", 422),
        (b"no gzip at all", "Content-Encoding: gzip\r\n", 400),
        (b"", "Content-Encoding: gzip\r\n", 422),
        (gzip.compress(scored() + b" " * 600_000, mtime=0), "Content-Encoding: gzip\r\n", 413),
        (b"{", "", 422),
        (b"", "", 422),
        (scored(scores=[float("nan"), 0.0]), "", 422),
        (scored(masks=[[1], [1]]), "", 422),
        (scored(unknown_field=True), "", 200),
    ],
)
async def test_a_post_has_the_status_of_its_error(server: Server, body: bytes, more: str, status: int) -> None:
    assert (await server.request(post(body, more)))[0] == status


async def test_a_request_split_over_packets_is_read_as_one(server: Server) -> None:
    whole = submit("pieces")
    head = whole.index(b"\r\n\r\n") + 4
    for cut in (1, head // 2, head - 2, head, head + 5, len(whole) - 1):
        status, _, _ = await server.request(whole[:cut], whole[cut:])
        assert status == 200
    assert await server.num_queued() == 1


@pytest.mark.parametrize(
    "first", ["GET /health HTTP/1.1", f"GET /v1/runs/{RUN}/status HTTP/1.1", "POST /nowhere HTTP/1.1"]
)
@pytest.mark.parametrize("hidden", [submit("smuggled"), post(scored())], ids=["submit", "post"])
async def test_a_request_inside_a_header_value_is_not_executed(server: Server, first: str, hidden: bytes) -> None:
    """The header value starts in its own packet, so a server that looks at packets instead of requests would execute it."""
    connection = await server.connect()
    before = await server.num_queued()
    await connection.send(f"{first}\r\nConnection: close\r\nX-Note: ".encode(), hidden)
    async with asyncio.timeout(30):
        responses = await connection.reader.read()
    assert responses.count(b"HTTP/1.1 ") == 1
    assert b"stored" not in responses
    assert b"received" not in responses
    assert await server.num_queued() == before
    assert await server.ledger.runs() == [RUN]


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    connection = await server.connect()
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.writer.write(submit("a") + submit("b") + health + submit("c") + submit("d"))
    found = [await connection.response() for _ in range(5)]
    assert [status for status, _, _ in found] == [200] * 5
    assert b'"ok"' in found[2][2]
    assert await server.num_queued() == 4


async def test_many_pipelined_requests_are_all_stored(server: Server) -> None:
    connection = await server.connect()
    requests = [submit(f"t{n}") for n in range(300)]
    connection.writer.write(b"".join(requests))
    for _ in requests:
        assert (await connection.response())[0] == 200
    assert await server.num_queued() == 300


async def test_a_submission_that_does_not_arrive_times_out(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(request(f"/v1/runs/{RUN}/submit", b"begin", wire.CONTENT_TYPE, length=1000))
    status, headers, body = await connection.response()
    assert (status, headers["Connection"]) == (408, "close")
    assert b"did not arrive within 1 s" in body
    assert server.bodies.receiving_bytes == 0


async def test_a_post_that_does_not_arrive_is_answered_with_503(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(request("/scored_data", b"begin", "application/json", length=1000))
    assert (await connection.response())[0] == 503
    assert server.bodies.receiving_bytes == 0


async def test_bodies_in_transit_share_one_limit(server: Server) -> None:
    holding = await server.connect()
    holding.writer.write(request("/scored_data", b"begin", "application/json", length=400_000))
    await server.until_receiving(400_000)
    large = b"x" * 300_000
    for refused in (submit("large", raw=large), post(large)):
        connection = await server.connect()
        connection.writer.write(refused[:1000])
        status, headers, _ = await connection.response()
        assert (status, headers["Retry-After"]) == (503, "1")
        connection.writer.close()
    holding.writer.close()
    await server.until_receiving(0)
    assert (await server.request(submit("after")))[0] == 200


async def test_an_aborted_request_frees_its_reserved_bytes(server: Server) -> None:
    connection = await server.connect()
    connection.writer.write(submit("gone")[:-10])
    await server.until_receiving(1)
    connection.writer.transport.abort()
    await server.until_receiving(0)
    assert await server.num_queued() == 0


async def test_a_body_that_the_server_stops_to_read_is_sent_again_by_the_client(tmp_path: Path) -> None:
    """The response is 408 or a closed connection; the client retries both."""
    async with serving(tmp_path) as server:
        connection = await server.connect()
        whole = submit("last")
        connection.writer.write(whole[:-5])
        await server.until_receiving(1)
    assert HTTPStatus.REQUEST_TIMEOUT in RETRIED
    responses = await connection.reader.read()
    assert responses == b"" or responses.startswith(b"HTTP/1.1 408")
