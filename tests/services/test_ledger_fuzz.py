"""Generated requests, from the OpenAPI document: never a server error, and the audit passes afterwards."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_run
from tests.parts.ledger.fuzz import Shapes
from tests.parts.ledger.groups import RUN, group_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.http import Caller, Response, submission
from tests.parts.ledger.service import serving

ENCODED = encode_group(group_of("a", (-1,)))
KNOWN: dict[str, list[Any]] = {
    "group_id": ["a@0", "b@0"],
    "task_id": ["a", "b"],
    "owner": ["w#0"],
    "owner_name": ["w"],
    "payload": [ENCODED.payload],
    "payload_digest": [ENCODED.digest],
    "publications": [[-1], [0]],
    "epoch": [0, 1],
    "step": [0, 1],
    "wait_s": [0.0],
    "drop": ["filtered: x"],
    "reason": ["invalid: y", "max_steps"],
}
PATHS = {
    "run": [RUN, "other", "..", "x\x00y", "ü"],
    "group_id": ["a@0", "b/c", "%"],
    "step": ["1", "-1", "x"],
}


class Target:
    """A ledger, its OpenAPI document, and a client for arbitrary requests."""

    def __init__(self, caller: Caller, ledger: Ledger, document: dict[str, Any]) -> None:
        self.caller, self.ledger, self.document = caller, ledger, document
        self.shapes = Shapes(document, KNOWN)

    def operations(self) -> list[tuple[str, str, dict[str, Any] | None]]:
        found = []
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                body = operation.get("requestBody")
                schema = None if body is None else body["content"][wire.CONTENT_TYPE]["schema"]
                if not path.endswith("/events"):
                    found.append((method.upper(), path, schema))
        return found

    async def send(self, method: str, path: str, body: Any, *, as_json: bool = False) -> Response:
        form: Any = msgspec.json if as_json else msgspec.msgpack
        raw = None if body is None else form.encode(body)
        content_type = wire.JSON_CONTENT_TYPE if as_json else wire.CONTENT_TYPE
        answer = await self.caller.call(method, f"/{path}", raw=raw, content_type=content_type)
        assert answer.status < 500, (method, path, body, answer.json)
        if answer.status >= 400 and answer.json is not None:
            assert answer.json["message"], (method, path, body)
        return answer


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    # One step needs nearly all groups of the run, so that no generated call of `batch` waits long.
    config = LedgerConfig(max_body_mb=1, max_queued_groups=500, max_queued_mb=1)
    telemetry = tmp_path / "run"
    (telemetry / "logs").mkdir(parents=True)
    async with (
        serving(tmp_path / "ledger", config=config, run_directory=telemetry) as (url, ledger),
        aiohttp.ClientSession() as session,
    ):
        await ledger.create_run(RUN, run_settings())
        await ledger.join(RUN, "w", nonce="n")
        caller = Caller(session, url)
        document = (await caller.call("GET", "//openapi.json")).json
        yield Target(caller, ledger, document)


async def assert_healthy(target: Target) -> None:
    assert (await target.caller.call("GET", "//health")).json["status"] == "ok"
    for run_id in await target.ledger.runs():
        report = await target.ledger.read(lambda tx, run_id=run_id: audit_run(tx, run_id))  # type: ignore[misc]
        assert report.violations == ()


def filled(path: str, choose: Any) -> str:
    for name, values in PATHS.items():
        path = path.replace(f"{{{name}}}", quote(choose(values), safe=""))
    return path


async def test_a_damaged_submission_never_causes_a_server_error(target: Target) -> None:
    """A valid submission with a flipped, removed or inserted byte, chosen by a seed."""
    rng = random.Random(7)
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
        answer = await target.caller.call("POST", "/submit", raw=bytes(raw))
        assert answer.status in (200, 400, 422), answer.json
    await assert_healthy(target)


async def test_an_invalid_value_in_any_field_never_causes_a_server_error(target: Target) -> None:
    """Each field of each message gets each of some invalid values."""
    invalid: list[Any] = [None, -1, 2**63, 2**64 - 1, 1.5, float("nan"), "", "x\x00", b"\xff", [], {}, [[[]]], True]
    base = {
        **submission("a"),
        "limit": 1,
        "draws": [],
        "nonce": "n",
        "request_id": "r",
        "restored_step": 0,
        "oldest_kept": 0,
        "groups": [submission("b")],
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
        "settings": {},
        "publication": {},
        "unusable": {},
    }
    base |= {"name": "m", "role": "policy", "node": "n", "address": "", "lease_s": 15.0, "load": 0.0}
    base |= {"file": "logs/policy-a.jsonl", "data": b"{}\n", "stream": "s", "start": 0}
    announcement = {"directory_id": "d", "version": "0.1.0", "config": "", "addresses": {}, "tokens": {}}
    base |= {"announcement": announcement, "member": "m", "relay": "", "after": 0}
    base |= {"kind": "annotate", "author": "a", "target": "a", "sample": 0, "note": "n"}
    for method, path, schema in target.operations():
        if schema is None:
            continue
        fields = target.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]].get("properties", {})
        message = {name: base[name] for name in fields}
        for name in fields:
            for value in invalid:
                await target.send(method, filled(path, lambda values: values[0]), {**message, name: value})
    await assert_healthy(target)


@pytest.mark.slow
def test_generated_requests_never_cause_a_server_error(tmp_path: Path) -> None:
    """Thousands of requests from the document, most of them invalid, as MessagePack and as JSON."""

    async def send_all(drawn: list[tuple[str, str, Any, bool]]) -> None:
        for method, path, body, as_json in drawn:
            await holder[0].send(method, path, body, as_json=as_json)

    loop = asyncio.new_event_loop()
    opened = target.__wrapped__(tmp_path)  # type: ignore[attr-defined]  # the fixture as a plain generator, on one loop for all examples
    holder = [loop.run_until_complete(anext(opened))]
    operations = holder[0].operations()

    @st.composite
    def request(draw: st.DrawFn) -> tuple[str, str, Any, bool]:
        method, path, schema = draw(st.sampled_from(operations))
        body = None if schema is None else draw(holder[0].shapes.mutated(schema))
        return method, filled(path, lambda values: draw(st.sampled_from(values))), body, draw(st.booleans())

    @settings(max_examples=400, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(request(), min_size=1, max_size=12))
    def send(drawn: list[tuple[str, str, Any, bool]]) -> None:
        loop.run_until_complete(send_all(drawn))

    try:
        send()
        loop.run_until_complete(assert_healthy(holder[0]))
    finally:
        loop.run_until_complete(opened.aclose())
        loop.close()
