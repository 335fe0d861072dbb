"""Invalid requests to the Atropos API never cause a server error."""

import asyncio
import gzip
import json
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollbook.ledger.atropos.models import RegisterEnv, Registration, ScoredData
from rollbook.ledger.atropos.openapi import VERBS
from rollbook.ledger.config import LedgerConfig
from tests.parts.ledger.atropos import Client, dialect, registration, scored

INVALID: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        -(2**63),
        2**64,
        10**40,
        1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "7",
        "x" * 2000,
    ),
    *("\x00", "\ud800", "é", [], [[]], [[1]], [[1, 2], [3]], [[[1]]], [None], {}, {"a": 1}, [{"role": "u"}], [[{}]]),
)
JSON = {"Content-Type": "application/json", "Connection": "close"}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with dialect(tmp_path, limits=LedgerConfig(max_body_mb=2)) as client:
        yield client


async def status_of(client: Client, method: str, path: str, **options: Any) -> int:
    status, answer = await client.status_of(method, path, **options)
    assert status < 500, (method, path, answer)
    return status


def valid(model: type[BaseModel]) -> dict[str, Any]:
    if model is Registration:
        return registration(4)
    if model is RegisterEnv:
        return {"max_token_length": 8, "desired_name": "e", "weight": 1.0, "group_size": 2}
    return scored(1) if model is ScoredData else {"env_id": 0}


@pytest.mark.parametrize("seed", range(4))
async def test_invalid_values_in_any_field_never_cause_a_server_error(client: Client, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        verb = rng.choice(VERBS)
        model = verb.body
        if model is None:
            await status_of(client, verb.method, verb.path)
            continue
        message = valid(model)
        for name in rng.sample(sorted(model.model_fields), k=rng.randint(0, min(2, len(model.model_fields)))):
            message[name] = rng.choice(INVALID)
        if rng.random() < 0.1:
            message.pop(rng.choice(sorted(message)))
        body = json.dumps([message, valid(model)] if verb.is_list else message)
        await status_of(client, verb.method, verb.path, data=body, headers=JSON)
    await assert_healthy(client)


@pytest.mark.parametrize("path", [verb.path for verb in VERBS if verb.body is not None])
async def test_bodies_that_are_not_a_message_are_rejected(client: Client, path: str) -> None:
    method = "GET" if path == "/status-env" else "POST"
    whole = json.dumps(scored(1)).encode()
    compressed = gzip.compress(whole)
    bomb = gzip.compress(b" " * 50_000_000)
    for body, headers in (
        (b"", JSON),
        (b"\x00\xff\xfe", JSON),
        (b"[" * 50_000, JSON),
        (b'{"a":' * 50_000, JSON),
        (whole[:-3], JSON),
        (whole, {**JSON, "Content-Type": "application/msgpack"}),
        (whole, {**JSON, "Content-Type": "multipart/form-data; boundary=x"}),
        (compressed[: len(compressed) // 2], {**JSON, "Content-Encoding": "gzip"}),
        (compressed[:12], {**JSON, "Content-Encoding": "gzip"}),
        (whole, {**JSON, "Content-Encoding": "gzip"}),
        (bomb, {**JSON, "Content-Encoding": "gzip"}),
    ):
        assert 400 <= await status_of(client, method, path, data=body, headers=headers) < 500
    await assert_healthy(client)


async def test_a_body_that_is_too_large_after_decompression_is_rejected(client: Client) -> None:
    bomb = gzip.compress(b'{"images":"' + b"x" * 50_000_000 + b'"}')
    status = await status_of(client, "POST", "/scored_data", data=bomb, headers={**JSON, "Content-Encoding": "gzip"})
    assert status == 413


async def test_idle_and_broken_connections_do_not_affect_others(client: Client) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    idle = await asyncio.to_thread(lambda: [socket.create_connection((host, int(port))) for _ in range(200)])
    for at, sock in enumerate(idle):
        if at % 4 == 1:
            sock.sendall(b"POST /scored_data HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{")
        elif at % 4 == 2:
            sock.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        elif at % 4 == 3:
            sock.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n")
    await asyncio.sleep(0.1)
    await assert_healthy(client)
    for sock in idle:
        sock.close()
    await assert_healthy(client)


async def assert_healthy(client: Client) -> None:
    assert await client.get("/reset_data") == "Reset successful"
    await client.start(2)
    await client.post("/scored_data", scored(5))
    assert await client.batch() == ["5"]
    await client.audited()
