"""Hostile requests to every server: they are answered with a 4xx, reserve nothing, and leave nothing behind."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from tests.parts.access.servers import SERVERS, TOKEN, Running, policy

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
DEPTH = 20_000
HUGE_BYTES = 200_000_000


@pytest.fixture(params=SERVERS)
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    async with SERVERS[request.param](tmp_path) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def status_of(
    session: aiohttp.ClientSession, server: Running, method: str, path: str, body: bytes | None = None
) -> int:
    url = URL(server.url + path, encoded=True)
    async with session.request(method, url, data=body, headers=AUTHORIZED, allow_redirects=False) as response:
        await response.read()
        return response.status


async def test_deeply_nested_json_is_a_client_error(session: aiohttp.ClientSession, server: Running) -> None:
    bodies = [b"[" * DEPTH, b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH]
    bodies += [b'{"messages":' + body + b',"kwargs":' + body + b"}" for body in bodies[1:]]
    # Inside a field that a message of ours declares, and one that is ignored.
    wrong = {}
    for method, path in server.routes():
        if method in ("POST", "PUT"):
            for body in bodies:
                status = await status_of(session, server, method, path, body)
                if status >= 500:
                    wrong[method, path, body[:14]] = status
    assert wrong == {}


async def test_overlong_and_strange_paths_are_client_errors(session: aiohttp.ClientSession, server: Running) -> None:
    names = ["a" * 7000, "%00", "%ff%fe", "..%2f..%2fetc%2fpasswd", "%F0%9F%92%A9" * 500, "%0d%0aX:%20y"]
    for method, path in {(method, path) for method, path in server.routes() if "some" in path}:
        for name in names:
            status = await status_of(session, server, method, path.replace("some", name), b"{}")
            assert status < 500, (method, path, name[:20], status)
    for path in ("/" + "a" * 100_000, "/health?" + "q" * 100_000):
        assert await status_of(session, server, "GET", path) in (400, 404, 414)


async def test_no_byte_of_a_body_is_awaited_before_the_token_is_checked(server: Running) -> None:
    """Only the head of a large request is sent. A server that checks the token first answers at once."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    for method, path in server.routes():
        if method not in ("POST", "PUT") or not await _needs_token(server, method, path):
            continue
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Authorization: Bearer wrong-token-000000\r\nContent-Length: {HUGE_BYTES}\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"401", path
        writer.close()


async def _needs_token(server: Running, method: str, path: str) -> bool:
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, data=b"{}", headers=headers) as response,
    ):
        return response.status == 401


async def test_names_that_are_only_asked_for_leave_nothing_behind(
    session: aiohttp.ClientSession, server: Running
) -> None:
    """No container of the process holds such a name afterwards. Bodies are invalid, so nothing is created on purpose."""
    marks = [f"wanderer-{server.url.rpartition(':')[2]}-{number}" for number in range(3)]
    for mark in marks:
        # First the route that ends a session, so that it does not hide what the others left.
        for method, path in sorted(server.routes(), key=lambda route: not route[1].endswith("/end")):
            for body in (b"{}", b"[]", msgspec.json.encode({"step": 1, "epoch": 1, "reward": None, "messages": []})):
                await status_of(session, server, method, path.replace("some", mark), body)
    async with session.get(f"{server.url}/metrics") as response:
        assert "wanderer" not in await response.text()
    tasks = [task.get_name() for task in asyncio.all_tasks() if "wanderer" in task.get_name()]
    assert tasks == []
    del mark, path, body
    gc.collect()
    assert _containers_with(marks) == []


def _containers_with(names: list[str]) -> list[str]:
    """Whole names only: yarl caches the last URLs, in a bounded number."""
    found = []
    for holder in gc.get_objects():
        if type(holder) is dict:
            held = [*holder, *(value for value in holder.values() if type(value) is str)]
        elif type(holder) is set:
            held = list(holder)
        else:
            continue
        if any(type(name) is str and name in names for name in held):
            found.append(str(holder)[:200])
    return found


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.text(max_size=40), st.sampled_from(["a" * 5000, "/x/" * 2000, "\0", "/etc/passwd", "/dev/zero", "/", "."])
    ),
    st.sampled_from(["update", "reload", "adapter"]),
)
async def test_a_path_of_weights_that_cannot_be_read_is_a_client_error(path: str, verb: str) -> None:
    body: dict[str, Any]
    if verb == "update":
        info = {"publication": 1, "step": 1, "epoch": 1, "digest": "0" * 32, "path": path}
        route, body = "/update_weights", {"update_info": info}
    elif verb == "reload":
        route, body = "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
    else:
        route, body = "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path}
    async with policy(Path()) as server, aiohttp.ClientSession() as session:
        status = await status_of(session, server, "POST", route, msgspec.json.encode(body))
        assert 400 <= status < 500, (verb, path[:30], status)


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "word"}],
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 1,
    "min_p": 0.0,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logprobs": True,
    "top_logprobs": 1,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logit_bias": {"1": 1.0},
    "stream": False,
    "stream_options": {},
    "model": "policy",
}
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "policy": {
        "/v1/completions": {**{k: v for k, v in CHAT.items() if k != "messages"}, "prompt": [1, 2], "echo": False},
        "/v1/chat/completions": CHAT,
        "/inference/v1/generate": {"model": "policy", "token_ids": [1], "sampling_params": CHAT, "request_id": "a"},
        "/tokenize": {"prompt": "a", "add_special_tokens": True},
        "/detokenize": {"tokens": [1]},
        "/abort_requests": {"request_ids": ["a"]},
        "/update_weights": {"update_info": {"path": "a", "publication": 1, "epoch": 1, "step": 1, "digest": "a"}},
        "/update_weight_version": {"new_version": "1"},
    },
    "proxy": {
        "/v1/chat/completions": CHAT,
        "/v1/responses": {
            "input": "word",
            "instructions": "a",
            "previous_response_id": "a",
            "max_output_tokens": 2,
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "metadata": {},
            "model": "policy",
        },
    },
}
HOSTILE_VALUES = [
    *("-1", "2147483648", "9223372036854775808", "1" + "0" * 400, "1e308", "1e999", "NaN", "true", "null", '""', "{}"),
    *('"\\u0000"', '"\\ud800"', '"' + "x" * 50_000 + '"', "[]", "[[]]", "[null]", "[-1]", "[18446744073709551616]"),
]


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_value_in_any_field_is_a_client_error(
    session: aiohttp.ClientSession, tmp_path: Path, name: str
) -> None:
    wrong: dict[tuple[str, str, str], int] = {}
    async with SERVERS[name](tmp_path) as server:
        for path, body in BODIES[name].items():
            for field in body:
                rest = {
                    key: value for key, value in body.items() if key in ("messages", "prompt", "token_ids", "input")
                }
                for value in HOSTILE_VALUES:
                    raw = json.dumps({**rest, field: "@"}).replace('"@"', value).encode()
                    # An own session for each request of the proxy: an episode has a limit of tokens.
                    sent = f"/s/{field}-{len(wrong)}{path}" if name == "proxy" else path
                    status = await status_of(session, server, "POST", sent, raw)
                    if status >= 500:
                        wrong[path, field, value[:20]] = status
        # A regular request is still served.
        if name == "policy":
            regular = msgspec.json.encode({"prompt": [1, 2], "max_tokens": 2})
            assert await status_of(session, server, "POST", "/v1/completions", regular) == 200
    assert wrong == {}
