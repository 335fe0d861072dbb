"""The guard in front of vLLM: an allow list of open paths, the run's token for all others, nothing for web pages."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.vllm.guard import OPEN_PATHS, TOKEN_FILE, VllmGuard

TOKEN = "a-token-of-at-least-sixteen-characters"
STEERING = [
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/reset_prefix_cache",
    "/abort_requests",
]


class Server:
    """The guard in front of an application that responds 200 to everything."""

    def __init__(self) -> None:
        self.guard = VllmGuard(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def request(self, path: str, headers: dict[bytes, bytes] | None = None, kind: str = "http") -> dict[str, Any]:
        """The first message of the response."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> None:
            raise AssertionError("the body of a refused request is not read")

        names = {b"host": b"127.0.0.1:8000", **(headers or {})}
        scope = {"type": kind, "path": path, "headers": list(names.items())}
        await self.guard(scope, receive, send)
        if len(sent) == 2:
            assert json.loads(sent[1]["body"])["error"]["message"]
        return sent[0]

    async def status(self, path: str, headers: dict[bytes, bytes] | None = None) -> int:
        return int((await self.request(path, headers))["status"])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(TOKEN_FILE, str(file))
    return Server()


def bearer(token: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {token}".encode()}


@pytest.mark.parametrize("path", STEERING)
async def test_requests_that_steer_need_the_token(server: Server, path: str) -> None:
    assert await server.status(path) == 401
    assert await server.status(path, bearer("another-token-of-sixteen-characters")) == 401
    assert await server.status(path, {b"authorization": TOKEN.encode()}) == 401
    assert await server.status(path, bearer(TOKEN)) == 200


async def test_completions_and_status_need_no_token(server: Server) -> None:
    assert {await server.status(path) for path in OPEN_PATHS} == {200}


@given(path=st.text(max_size=30), prefix=st.sampled_from(["/", "//", "/v1/", "/v1/models/../", "/health/", "/health%"]))
def test_every_other_spelling_of_a_path_needs_the_token(path: str, prefix: str) -> None:
    guard = VllmGuard.__new__(VllmGuard)
    guard._digest = b""
    asked = prefix + path
    problem = guard._problem({"path": asked, "headers": [(b"host", b"localhost")]})
    assert problem[0] == (200 if asked in OPEN_PATHS else 401)


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"evil.example"},
        {b"host": b"localhost.evil.example"},
        {b"host": b"127.0.0.1.evil.example:8000"},
        {b"host": b"0.0.0.0"},
        {b"host": b""},
        {b"origin": b"https://evil.example"},
        {b"origin": b"null"},
        {b"origin": b"http://127.0.0.1:8000"},
        {b"sec-fetch-site": b"cross-site"},
        {b"sec-fetch-site": b"same-site"},
    ],
)
async def test_web_pages_are_refused_on_every_path_also_with_the_token(
    server: Server, headers: dict[bytes, bytes]
) -> None:
    for path in ("/health", "/v1/completions", "/pause"):
        assert await server.status(path, {**bearer(TOKEN), **headers}) == 403


async def test_a_websocket_without_the_token_is_closed(server: Server) -> None:
    assert (await server.request("/v1/realtime", kind="websocket"))["type"] == "websocket.close"


async def test_names_of_this_machine_are_known(server: Server) -> None:
    for host in (b"localhost", b"LOCALHOST:1", b"127.0.0.1", b"[::1]:8000", b"::1"):
        assert await server.status("/health", {b"host": host}) == 200
