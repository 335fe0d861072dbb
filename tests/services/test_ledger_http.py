"""Requests to the native API that must be rejected: content types, sizes, fields, tokens."""

import gzip
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import RunError
from rollbook.contracts.group_codec import encode_group, payload_digest
from rollbook.ledger.config import LedgerConfig, LedgerServerConfig
from rollbook.ledger.http import verbs
from rollbook.ledger.http.auth import Keys, Role, require_tokens
from rollbook.ledger.http.compression import compress
from rollbook.ledger.serve import keys_of, open_ledger_service
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.frames import changed_frame
from tests.parts.ledger.groups import RUN, group_of, settings
from tests.parts.ledger.http import Caller, submission

TOKENS = {role: f"{role}-token-of-some-length" for role in Role}
CONFIG = LedgerConfig(max_body_mb=0.5, max_receiving_mb=0.6, max_queued_groups=1000)


async def serve(tmp_path: Path, keys: Keys | None = None) -> AsyncIterator[Caller]:
    log = EventLog("ledger", echo=sys.stdout)
    with listening_socket("127.0.0.1", 0) as sock:
        async with (
            open_ledger_service(sqlite_url(tmp_path), CONFIG, log=log, keys=keys) as service,
            service.serving(sock.dup(), drain_s=1),
            aiohttp.ClientSession() as session,
        ):
            await service.ledger.create_run(RUN, settings())
            yield Caller(session, url_of(sock))


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async for found in serve(tmp_path):
        yield found


@pytest.fixture
async def with_tokens(tmp_path: Path) -> AsyncIterator[Caller]:
    async for found in serve(tmp_path, Keys({role: [token] for role, token in TOKENS.items()})):
        yield found


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/octet-stream", "application/x-www-form-urlencoded"]
)
async def test_a_body_of_another_content_type_is_rejected(caller: Caller, content_type: str | None) -> None:
    answer = await caller.call("POST", "/submit", submission("a"), content_type=content_type)
    assert answer.status == 415
    assert "application/msgpack" in answer.json["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a",
        b"\xa3\xff\xfe\xfd",
        b"\x91" * 5_000,
        b"{}",
        b"\xc0",
    ],
    ids=["empty", "never used", "cut off", "huge map", "no value", "bad text", "deep", "json", "nil"],
)
async def test_malformed_messagepack_is_rejected(caller: Caller, raw: bytes) -> None:
    answer = await caller.call("POST", "/submit", raw=raw)
    assert answer.status in (400, 422)
    assert answer.json["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt", -1),
        ("attempt", 2**63),
        ("attempt", 2**64 - 1),
        ("attempt", 1.5),
        ("attempt", "7"),
        ("attempt", -(2**63)),
        ("id", ""),
        ("id", "x" * 600),
        ("id", "nul\x00byte"),
        ("id", None),
        ("drop", "filtered"),
        ("drop", {"kind": "no such reason"}),
        ("drop", {"kind": "stale", "detail": "\x00"}),
        ("drop", {"kind": "stale", "detail": "x" * 10_001}),
        ("outcome", {}),
        ("producer", ""),
        ("producer", "x\x00"),
        ("surprise", 1),
    ],
)
async def test_a_submission_with_an_invalid_field_is_not_stored(caller: Caller, field: str, value: Any) -> None:
    answer = await caller.call("POST", "/submit", submission("a", **{field: value}))
    assert answer.status == 422, answer.json
    assert (await caller.call("GET", "/status")).json["opened"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "b@0"),
        ("payload", b""),
        ("payload", b"no group"),
        ("payload", changed_frame(group_of("a", (-1,)), draw=-1)),
        ("payload", changed_frame(group_of("a", (-1,)), draw=2**53)),
        ("payload", changed_frame(group_of("a", (-1,)), task_id="")),
        ("payload", changed_frame(group_of("a", (-1,)), task_id="x" * 600)),
        ("payload", changed_frame(group_of("a", (-1,)), task_id="nul\x00byte")),
        ("payload", encode_group(group_of("a", (7,))).payload),
        ("digest", "other"),
        ("producer", "never registered"),
    ],
)
async def test_a_group_that_cannot_be_stored_is_refused_with_its_error(caller: Caller, field: str, value: Any) -> None:
    changes = {field: value} if field != "payload" else {field: value, "digest": payload_digest(value)}
    answer = await caller.call("POST", "/submit", submission("a", **changes))
    (result,) = answer.json["results"]
    assert (answer.status, result["receipt"], result["error"]["status"]) == (200, None, 422)
    assert (await caller.call("GET", "/status")).json["opened"] == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2**70 * 1.0 * 10**300])
async def test_an_outcome_with_a_number_that_is_not_finite_is_rejected(caller: Caller, number: float) -> None:
    sent = submission("a")
    sent["groups"][0]["outcome"]["seconds"] = number
    answer = await caller.call("POST", "/submit", sent)
    assert answer.status == (200 if number < float("inf") else 422)


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
async def test_an_invalid_wait_time_is_rejected(caller: Caller, wait_s: float) -> None:
    answer = await caller.call("POST", "/batch", {"step": 1, "epoch": 0, "wait_s": wait_s})
    assert answer.status == 422


@pytest.mark.parametrize("compressor", [compress, gzip.compress])
async def test_a_compressed_body_is_accepted(caller: Caller, compressor: Any) -> None:
    encoding = "gzip" if compressor is gzip.compress else "zstd"
    raw = compressor(msgspec.msgpack.encode(submission("a")))
    answer = await caller.call("POST", "/submit", raw=raw, headers={"Content-Encoding": encoding})
    assert (answer.status, answer.json["results"][0]["receipt"]) == (200, "stored")


@pytest.mark.parametrize("compressor", [compress, gzip.compress])
async def test_a_body_that_is_too_large_after_decompression_is_rejected(caller: Caller, compressor: Any) -> None:
    encoding = "gzip" if compressor is gzip.compress else "zstd"
    bomb = compressor(bytes(200_000_000))
    assert len(bomb) < 500_000
    answer = await caller.call("POST", "/submit", raw=bomb, headers={"Content-Encoding": encoding})
    assert answer.status == 413
    assert (await caller.call("GET", "//health")).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "deflate"])
async def test_a_damaged_compressed_body_is_rejected(caller: Caller, encoding: str) -> None:
    answer = await caller.call("POST", "/submit", raw=b"not compressed at all", headers={"Content-Encoding": encoding})
    assert answer.status == 400
    assert (await caller.call("GET", "//health")).status == 200


@pytest.mark.parametrize("compressor", [compress, gzip.compress])
async def test_a_truncated_compressed_body_is_rejected(caller: Caller, compressor: Any) -> None:
    encoding = "gzip" if compressor is gzip.compress else "zstd"
    raw = compressor(msgspec.msgpack.encode(submission("a")))[:-20]
    answer = await caller.call("POST", "/submit", raw=raw, headers={"Content-Encoding": encoding})
    assert answer.status == 400


async def test_an_unknown_content_encoding_is_rejected(caller: Caller) -> None:
    answer = await caller.call("POST", "/submit", raw=b"x", headers={"Content-Encoding": "snappy"})
    assert answer.status == 415


async def test_a_body_that_is_too_large_is_rejected(caller: Caller) -> None:
    answer = await caller.call("POST", "/submit", raw=bytes(600_000))
    assert answer.status == 413
    assert "500000" in answer.json["message"]


async def test_json_is_accepted_and_returned(caller: Caller) -> None:
    raw = msgspec.json.encode({"owner_name": "me", "nonce": "n"})
    answer = await caller.call("POST", "/join", raw=raw, content_type="application/json")
    assert answer.json == {"owner": "me#0"}


@pytest.mark.parametrize("path", ["/groups?limit=-1", "/groups?limit=x", "/groups?limit=9999", "/groups?state=odd"])
async def test_invalid_query_parameters_are_rejected(caller: Caller, path: str) -> None:
    assert (await caller.call("GET", path)).status == 422


@pytest.mark.parametrize(
    "path", ["/groups/none", "/groups/none/payload", "/batches/7", "//v1/runs/other/status", "//v2"]
)
async def test_unknown_objects_are_not_found(caller: Caller, path: str) -> None:
    assert (await caller.call("GET", path)).status == 404


async def test_only_health_and_the_openapi_document_need_no_token(with_tokens: Caller) -> None:
    assert (await with_tokens.call("GET", "//health")).status == 200
    for path in ("//openapi.json", "//v1/openapi.json"):
        assert (await with_tokens.call("GET", path)).status == 200
    for method, path in (("GET", "/status"), ("POST", "/submit"), ("GET", "//metrics"), ("POST", "/take_role")):
        answer = await with_tokens.call(method, path)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer ", "Basic abc", TOKENS[Role.VIEWER], "Bearer \xfcmlaut"])
async def test_a_wrong_token_is_rejected(with_tokens: Caller, header: str) -> None:
    answer = await with_tokens.call("GET", "/status", headers={"Authorization": header})
    assert answer.status == 401
    assert "wrong" not in answer.json["message"]


@pytest.mark.parametrize(
    ("role", "path", "body", "status"),
    [
        (Role.PRODUCER, "/join", {"owner_name": "a", "nonce": "n"}, 200),
        (Role.TRAINER, "/join", {"owner_name": "a", "nonce": "n"}, 403),
        (Role.VIEWER, "/join", {"owner_name": "a", "nonce": "n"}, 403),
        (Role.PRODUCER, "/take_role", {"restored_step": 0}, 403),
        (Role.TRAINER, "/take_role", {"restored_step": 0}, 200),
    ],
)
async def test_a_role_may_only_call_its_own_verbs(
    with_tokens: Caller, role: Role, path: str, body: dict[str, Any], status: int
) -> None:
    headers = {"Authorization": f"Bearer {TOKENS[role]}"}
    assert (await with_tokens.call("POST", path, body, headers=headers)).status == status
    assert (await with_tokens.call("GET", "/status", headers=headers)).status == 200


def test_every_role_needs_a_token_off_loopback() -> None:
    some = Keys({Role.PRODUCER: ["p" * 20]})
    require_tokens("127.0.0.1", some)
    require_tokens("::1", some)
    with pytest.raises(RunError, match=r"on 0\.0\.0\.0 without a token for trainer, viewer"):
        require_tokens("0.0.0.0", some)
    require_tokens("0.0.0.0", Keys({role: [token] for role, token in TOKENS.items()}))


def test_short_tokens_are_rejected_and_tokens_are_never_shown() -> None:
    with pytest.raises(RunError, match="fewer than 16"):
        Keys({Role.VIEWER: ["short"]})
    config = LedgerServerConfig(viewer_tokens=("secret-viewer-token",))
    assert "secret-viewer" not in repr(config)
    assert "secret-viewer" not in repr(vars(keys_of(config)))
    assert keys_of(config).roles_of("secret-viewer-token") == {Role.VIEWER}


def test_a_message_with_an_unknown_field_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"step": 1, "epoch": 1, "wait": 2.0}, verbs.Batch)
