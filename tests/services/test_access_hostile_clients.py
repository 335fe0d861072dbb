"""Hostile requests to every server: they are answered with a 4xx, reserve nothing, and leave nothing behind."""

import asyncio
import gc
import io
import json
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.wire.token_stream import (
    MAX_FRAME_ITEMS,
    STREAM_PATH,
    ClientFrame,
    ServerFrame,
    StreamedOutcome,
    StreamedRequest,
)
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.access.servers import SERVERS, TOKEN, Running, byte_tokenizer, policy, policy_with_text

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
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """No container of the process holds such a name afterwards. Bodies are invalid, so nothing is created on purpose."""
    marks = []
    async with AsyncExitStack() as servers:
        # All at once: reading every container of the process takes seconds.
        for name, opened in SERVERS.items():
            directory = tmp_path / name
            directory.mkdir()
            server = await servers.enter_async_context(opened(directory))
            marks += [f"wanderer-{name}-{number}" for number in range(3)]
            for mark in marks[-3:]:
                # First the route that ends a session, so that it does not hide what the others left.
                for method, path in sorted(server.routes(), key=lambda route: not route[1].endswith("/end")):
                    for body in (
                        b"{}",
                        b"[]",
                        msgspec.json.encode({"step": 1, "epoch": 1, "reward": None, "messages": []}),
                    ):
                        await status_of(session, server, method, path.replace("some", mark), body)
            async with session.get(f"{server.url}/metrics") as response:
                assert "wanderer" not in await response.text(), name
        tasks = [task.get_name() for task in asyncio.all_tasks() if "wanderer" in task.get_name()]
        assert tasks == []
        del mark, path, body
        # Also the containers of imported modules, which tests/conftest.py hides from the collector.
        gc.unfreeze()
        gc.collect()
        found = _containers_with(frozenset(marks))
        gc.freeze()
        assert found == []


CONTAINERS = (dict, set, defaultdict, Counter, OrderedDict)


def _containers_with(names: frozenset[str]) -> list[str]:
    """Whole names only: yarl caches the last URLs, in a bounded number."""
    found = []
    for holder in _containers():
        held = [*holder, *holder.values()] if isinstance(holder, dict) else list(holder)
        if any(type(name) is str and name in names for name in held):
            found.append(str(holder)[:200])
    return found


def _containers() -> Iterator[dict[Any, Any] | set[Any]]:
    for holder in gc.get_objects():
        if type(holder) in CONTAINERS:
            yield holder
        # The collector does not list dictionaries of numbers and strings, only what holds them.
        for held in gc.get_referents(holder):
            if type(held) is dict and not gc.is_tracked(held):
                yield held


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


def chat_of(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}], **fields}


MESSAGE = {"role": "user", "content": "a"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
MANY_RULES = "\n".join(
    ["start: " + " | ".join(f"r{n}" for n in range(3_000)), *(f"r{n}: /[a-z]+{n}/" for n in range(3_000))]
)
OVERSIZED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stop strings": ("/v1/completions", {"prompt": "a", "stop": ["x"] * 65}, "stop"),
    "a long stop string": ("/v1/chat/completions", chat_of(stop="x" * 1025), "stop"),
    "stop tokens": ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    "messages": ("/v1/chat/completions", chat_of(messages=[MESSAGE] * 4097), "messages"),
    "messages to tokenize": ("/tokenize", {"messages": [MESSAGE] * 4097}, "messages"),
    "tools": ("/v1/chat/completions", chat_of(tools=[FUNCTION] * 513), "tools"),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1025}, "n"),
    "characters of a prompt": ("/v1/completions", {"prompt": "a" * 600_000}, "prompt"),
    "characters of a chat": ("/v1/chat/completions", chat_of(messages=[{**MESSAGE, "content": "a" * 600_000}]), "messages"),
    "tokens of a prompt": ("/tokenize", {"prompt": "a1" * 50_000}, "prompt"),
    "tokens to decode": ("/detokenize", {"tokens": [5] * 40_000}, "tokens"),
    "objects": ("/v1/chat/completions", chat_of(messages=[{}] * 17_000), ""),
    "numbers": ("/v1/completions", {"prompt": [1] * 270_000}, ""),
    "members": ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(33_000)}}, ""),
    "grammar": ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": MANY_RULES}}, "structured_outputs"),
}  # fmt: skip


async def test_requests_above_the_limits_of_the_policy_server_are_refused_by_name(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with policy_with_text(tmp_path) as server:
        for case, (path, body, field) in OVERSIZED.items():
            async with session.post(server.url + path, json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"] or "") == (400, field), (case, error)
        blanks = io.BytesIO(b" " * 3_000_000)
        async with session.post(server.url + "/v1/completions", data=blanks, headers=AUTHORIZED) as response:
            assert response.status == 413
        async with session.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
            assert response.status == 200


async def test_long_texts_and_chats_are_encoded_outside_of_the_event_loop(
    session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, bool] = {}
    encode_long, render = ModelTokenizer._encode_long, ModelTokenizer.render

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            used[name] = threading.current_thread() is threading.main_thread()
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(ModelTokenizer, "_encode_long", watched("encode", encode_long))
    monkeypatch.setattr(ModelTokenizer, "render", watched("render", render))
    long = "hello world " * 1_000
    many = ["hello " * 20] * 200
    requests: list[tuple[str, dict[str, Any], set[str]]] = [
        ("/v1/completions", {"prompt": long, "max_tokens": 1}, {"encode"}),
        ("/v1/completions", {"prompt": many, "max_tokens": 1}, {"encode"}),
        ("/tokenize", {"prompt": long}, {"encode"}),
        ("/v1/chat/completions", chat_of(messages=[{**MESSAGE, "content": long}]), {"encode", "render"}),
        ("/v1/chat/completions", chat_of(messages=[MESSAGE] * 300), {"render"}),
        ("/v1/chat/completions", chat_of(tools=[FUNCTION] * 300), {"render"}),
    ]
    async with policy_with_text(tmp_path) as server:
        for path, body, names in requests:
            used.clear()
            async with session.post(server.url + path, json=body) as response:
                assert response.status == 200, await response.text()
            assert names <= used.keys()
            assert not any(used.values()), (path, used)


async def test_a_repeated_id_of_the_token_stream_is_refused_and_the_first_request_ends(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    request = StreamedRequest.of(7, [1], SamplingParams(max_tokens=2), min_publication=0)
    async with policy(tmp_path) as server, session.ws_connect(server.url + STREAM_PATH) as socket:
        await socket.send_bytes(msgspec.msgpack.encode(ClientFrame([request, request], [])))
        outcomes: list[StreamedOutcome] = []
        while len(outcomes) < 2:
            outcomes += msgpack_decoder(ServerFrame).decode((await socket.receive()).data).outcomes
        assert sorted(outcome.error.status if outcome.error else 0 for outcome in outcomes) == [0, 400]
        await socket.send_bytes(msgspec.msgpack.encode(ClientFrame([request] * (MAX_FRAME_ITEMS + 1), [])))
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_ids_with_braces_are_found(session: aiohttp.ClientSession, server: Running) -> None:
    """A route that matches no braces would not be found at all."""
    for method, path in server.routes():
        if "/some" in path and method == "GET":
            for name in ("a{b}", "{}", "a%7Bb%7D@0"):
                url = URL(server.url + path.replace("some", name), encoded=True)
                async with session.get(url, headers=AUTHORIZED) as response:
                    assert "404: Not Found" not in await response.text(), url


def test_only_the_beginning_of_a_text_that_is_too_long_is_encoded() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(chr(97 + n % 26) + str(n % 10) for n in range(20_000))
    whole = tokenizer.encode(text)
    for limit in (1, 100, len(whole) - 1, len(whole), len(whole) + 1):
        assert tokenizer.encode(text, max_tokens=limit) == whole[:limit]
        assert tokenizer.encode_prompt(text, max_tokens=limit) == whole[:limit]


async def test_the_mistakes_of_a_hostile_post_are_counted_and_not_listed(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with SERVERS["ledger"](tmp_path) as server:
        posts = {
            "/register": {str(n): 1 for n in range(40_000)},
            "/register-env": [{}] * 20_000,
            "/scored_data": {"tokens": [], "masks": [], "scores": [], "messages": [{"a": 1}] * 5_000},
        }
        for path, body in posts.items():
            data = io.BytesIO(json.dumps(body).encode())
            async with session.post(server.url + path, data=data, headers=AUTHORIZED) as response:
                reply = await response.json()
                assert (response.status, len(reply["detail"])) == (422, 1), path
                assert "too many values" in reply["detail"][0]["msg"] or "invalid values" in reply["detail"][0]["msg"]
