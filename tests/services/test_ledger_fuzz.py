"""Invalid requests, to the native API and to that of Atropos, never cause a server error, and the audit passes afterwards."""

import asyncio
import gzip
import json
import random
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from rollbook.contracts.group_codec import EncodedGroup
from rollbook.ledger.atropos.models import RegisterEnv, Registration, ScoredData
from rollbook.ledger.atropos.openapi import VERBS as ATROPOS_VERBS
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.verbs import VERBS
from rollbook.ledger.tools.audit import audit_run
from tests.parts.ledger.atropos import Client, dialect, registration, scored
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.http import Caller, group_body, submission

EXAMPLES = 8
TIMEOUT_S = 900
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
    """Both APIs on one server."""
    limits = LedgerConfig(max_body_mb=2, max_queued_groups=500, max_queued_mb=1)
    async with dialect(tmp_path, limits=limits) as client:
        await client.ledger.create_run(RUN, run_settings())
        await client.ledger.join(RUN, "w", nonce="n")
        yield client


async def assert_healthy(client: Client) -> None:
    for run_id in await client.ledger.runs():
        report = await client.ledger.read(lambda tx, run_id=run_id: audit_run(tx, run_id))  # type: ignore[misc]
        assert report.violations == ()
    assert await client.get("/reset_data") == "Reset successful"
    await client.start(2)
    await client.post("/scored_data", scored(5))
    assert await client.batch() == ["5"]
    await client.audited()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("document", ["/v1/openapi.json", "/openapi.json"], ids=["native", "atropos"])
async def test_requests_generated_from_the_openapi_document_cause_no_server_error(
    client: Client, tmp_path: Path, document: str
) -> None:
    (tmp_path / "schemathesis.toml").write_text(f'[parameters]\n"path.run" = "{RUN}"\n', encoding="utf-8")
    command = ["-m", "schemathesis.cli", "run", f"{client.url}{document}", "--url", client.url]
    options = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    stable = ["--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all"]
    # The response to this request ends when the server stops.
    endless = ["--exclude-path", "/v1/runs/{run}/events"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, *stable, *endless, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 0, output.decode()[-4000:]
    assert "passed" in output.decode()
    await assert_healthy(client)


async def test_a_damaged_submission_never_causes_a_server_error(client: Client) -> None:
    """A valid submission with a flipped, removed or inserted byte, chosen by a seed."""
    rng, caller = random.Random(7), Caller(client.session, client.url)
    good = msgspec.msgpack.encode(submission("a"))
    for _ in range(300):
        raw = bytearray(good)
        at = rng.randrange(len(raw))
        kind = rng.randrange(3)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at:]
        else:
            raw.insert(at, rng.randrange(256))
        answer = await caller.call("POST", "/submit", raw=bytes(raw))
        assert answer.status in (200, 400, 422), answer.json
    await assert_healthy(client)


async def test_an_invalid_value_in_any_field_of_a_native_message_never_causes_a_server_error(client: Client) -> None:
    """Each field of each message gets each of some invalid values."""
    invalid: list[Any] = [None, -1, 2**63, 2**64 - 1, 1.5, float("nan"), "", "x\x00", b"\xff", [], {}, [[[]]], True]
    base = {
        **submission("b"),
        "group_id": "a@0",
        "attempt": 1,
        "outcome": group_body("a")["outcome"],
        "limit": 1,
        "draws": [],
        "nonce": "n",
        "request_id": "r",
        "restored_step": 0,
        "oldest_kept": 0,
    }
    base |= {
        "weights_digest": "w",
        "cause": "c",
        "reason": "filtered: x",
        "weight": 1.0,
        "min_share": 0.0,
        "wait_s": 0.0,
    }
    base |= {
        "owner": "w#0",
        "owner_name": "w",
        "epoch": 0,
        "step": 1,
        "split": {"max_tokens": 1, "gradient_checkpointing": False},
        "settings": {},
        "publication": {},
        "unusable": {},
    }
    base |= {"name": "m", "role": "policy", "node": "n", "address": "", "lease_s": 15.0, "load": 0.0}
    base |= {"file": "logs/policy-a.jsonl", "data": b"{}\n", "stream": "s", "start": 0}
    announcement = {"directory_id": "d", "version": "0.1.0", "config": "", "addresses": {}, "tokens": {}}
    base |= {"announcement": announcement, "member": "m", "relay": "", "after": 0}
    base |= {"kind": "annotate", "author": "a", "target": "a", "sample": 0, "note": "n"}
    caller, schemas = Caller(client.session, client.url), openapi_document()["components"]["schemas"]
    for verb in VERBS:
        if not verb.has_body:
            continue
        message = {name: base[name] for name in schemas[verb.request.__name__]["properties"]}
        for name in message:
            for value in invalid:
                path = f"/{verb.path.format(run=RUN)}"
                response = await caller.call(verb.method, path, {**message, name: value})
                assert response.status < 500, (verb.name, name, value, response.json)
                if response.status >= 400:
                    assert response.json["message"]
    for name in EncodedGroup.__struct_fields__:
        for value in invalid:
            response = await caller.call("POST", "/submit", submission("a", **{name: value}))
            assert response.status < 500, (name, value, response.json)
    await assert_healthy(client)


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
async def test_invalid_values_in_any_field_of_atropos_never_cause_a_server_error(client: Client, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        verb = rng.choice(ATROPOS_VERBS)
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


@pytest.mark.parametrize("path", [verb.path for verb in ATROPOS_VERBS if verb.body is not None])
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
