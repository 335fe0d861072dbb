"""No web page in a browser can reach a server: every route of every server is attacked."""

import ast
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import httpx
import pytest

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.forwarder import open_sinks
from rollbook.telemetry.sinks.prometheus import PrometheusSink
from tests.parts.access.servers import SERVERS, STARTED_IN, TOKEN, Running

PACKAGE = Path(__file__).parents[2] / "rollbook"
SIMPLE_TYPES = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain;application/json",
]


@pytest.fixture(params=SERVERS)
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    async with SERVERS[request.param](tmp_path) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def test_every_server_of_the_package_is_attacked_here() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "serve_app"
    }
    assert found == STARTED_IN


async def statuses(
    session: aiohttp.ClientSession, server: Running, headers: dict[str, str], data: bytes | None = None
) -> dict[tuple[str, str], int]:
    found = {}
    for method, path in server.routes():
        async with session.request(
            method if method != "*" else "GET", server.url + path, headers=headers, data=data, allow_redirects=False
        ) as response:
            found[method, path] = response.status
    return found


ATTACKS = {
    "DNS rebinding": {"Host": "evil.example"},
    "DNS rebinding, same origin": {"Host": "evil.example", "Origin": "http://evil.example"},
    "a name that starts like ours": {"Host": "localhost.evil.example"},
    "a name that starts like our address": {"Host": "127.0.0.1.evil.example"},
    "the unspecified address": {"Host": "0.0.0.0"},
    "an address that is not bound": {"Host": "192.168.0.7"},
    "a foreign page": {"Origin": "https://evil.example"},
    "a sandboxed frame": {"Origin": "null"},
    "a page of another port": {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
    "an image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "an image on a page of another port": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "image"},
}


async def test_no_route_answers_a_foreign_page(session: aiohttp.ClientSession, server: Running) -> None:
    for attack, headers in ATTACKS.items():
        found = await statuses(session, server, {"Content-Type": "application/json", **headers}, b"{}")
        assert set(found.values()) == {403}, (attack, found)


async def test_a_body_that_a_form_can_send_changes_nothing(session: aiohttp.ClientSession, server: Running) -> None:
    for content_type in SIMPLE_TYPES:
        found = await statuses(session, server, {"Content-Type": content_type}, b'{"init_info": {}, "reward": 1}')
        changing = {route: status for route, status in found.items() if route[0] in ("POST", "PUT", "PATCH")}
        assert bool(changing) != server.is_read_only
        assert set(changing.values()) <= {415, 422}, (content_type, changing)


async def test_a_body_without_a_content_type_changes_nothing(session: aiohttp.ClientSession, server: Running) -> None:
    for method, path in server.routes():
        if method in ("POST", "PUT"):
            async with session.request(
                method, server.url + path, data=b"{}", skip_auto_headers=("Content-Type",)
            ) as response:
                assert response.status in (415, 422), (method, path)


# What every process of this machine may request without a token: producing, reading and playing.
OPEN_ON_LOOPBACK = {
    "ledger": {
        "/v1/runs/some/submit",
        "/v1/runs/some/producers",
        *(
            f"{prefix}/{verb}"
            for prefix in ("", "/atropos/some")
            for verb in ("register", "register-env", "disconnect-env", "scored_data", "scored_data_list")
        ),
    },
    "policy": {
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        "/abort_requests",
    },
}


@pytest.mark.parametrize("name", OPEN_ON_LOOPBACK)
async def test_every_request_that_steers_a_run_needs_the_token(
    session: aiohttp.ClientSession, tmp_path: Path, name: str
) -> None:
    """A route that is not listed as open must refuse, so that a new one cannot be forgotten."""
    async with SERVERS[name](tmp_path) as server:
        for token in ({}, {"Authorization": "Bearer 0123456789abcdef0123"}, {"Authorization": f"Basic {TOKEN}"}):
            found = await statuses(session, server, {"Content-Type": "application/json", **token}, b"{}")
            changing = {path: status for (method, path), status in found.items() if method != "GET"}
            assert {path for path, status in changing.items() if status != 401} == OPEN_ON_LOOPBACK[name]
        right = await statuses(
            session, server, {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}, b"{}"
        )
        assert 401 not in right.values()


async def test_a_refusal_says_what_is_wrong_and_what_to_do(session: aiohttp.ClientSession, server: Running) -> None:
    for headers, word in (({"Host": "evil.example"}, "--allow-host"), ({"Origin": "http://x"}, "--allow-origin")):
        async with session.get(server.url + "/health", headers=headers) as response:
            assert word in await response.text()


async def test_a_client_on_this_machine_is_served(session: aiohttp.ClientSession, server: Running) -> None:
    port = server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", "[::1]"):
        for headers in ({}, {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
            sent = {"Content-Type": "application/json", "Host": host, **headers}
            found = await statuses(session, server, sent, b"[]")
            # A folder of files is not listed; its files are served. An action needs the token of an operator.
            refused = {path for (_, path), status in found.items() if status in (403, 415)} - {
                "/static",
                "/api/actions",
            }
            # Two GETs of the Atropos API change data and are refused to every browser.
            assert all(headers and path.endswith(("/batch", "/reset_data")) for path in refused), (sent, refused)


def test_on_an_address_that_other_machines_reach_prometheus_sends_the_token_in_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set prometheus_token_file"):
        TelemetryConfig(sinks=("prometheus",), prometheus_host="0.0.0.0")
    config = TelemetryConfig(
        sinks=("prometheus",), prometheus_host="0.0.0.0", prometheus_port=0, prometheus_token_file=Path("scrape-token")
    )
    sink = open_sinks(config, directory=tmp_path, run_name="run", settings={})["prometheus"]
    assert isinstance(sink, PrometheusSink)
    sink.write({"train/loss": 2.5}, process="trainer", step=1, at=0.0)
    url = f"http://127.0.0.1:{sink.port}/metrics"
    token = (tmp_path / "scrape-token").read_text().strip()
    assert (tmp_path / "scrape-token").stat().st_mode & 0o777 == 0o600
    for wrong in ({}, {"Authorization": "Bearer 0123456789abcdef"}, {"Authorization": f"Basic {token}"}):
        refused = httpx.get(url, headers=wrong, timeout=60)
        assert (refused.status_code, "train_loss" in refused.text) == (401, False)
    assert "rollbook_train_loss" in httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=60).text
    sink.close()


def test_connections_to_the_prometheus_sink_that_send_nothing_start_no_thread(tmp_path: Path) -> None:
    config = TelemetryConfig(sinks=("prometheus",), prometheus_port=0)
    sink = open_sinks(config, directory=tmp_path, run_name="run", settings={})["prometheus"]
    assert isinstance(sink, PrometheusSink)
    before = threading.active_count()
    with ExitStack() as idle:
        for _ in range(50):
            idle.enter_context(socket.create_connection(("127.0.0.1", sink.port)))
        # A response shows that the server has accepted the earlier connections.
        assert httpx.get(f"http://127.0.0.1:{sink.port}/metrics", timeout=60).status_code == 200
        assert threading.active_count() == before
    sink.close()
