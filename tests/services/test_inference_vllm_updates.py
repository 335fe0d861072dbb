"""Weight updates of vLLM servers that fail, hang or are repeated. A stand-in has the routes of vLLM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from rollbook.access.server import serve_app
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import TransientError
from rollbook.inference.connection import PolicyConnection, open_connection
from rollbook.inference.vllm import client as vllm_client
from rollbook.inference.vllm.adapters import VllmAdapterServerApi
from rollbook.inference.vllm.client import VllmServerApi
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.transport import update_message
from rollbook.inference.wire.weights import AdapterInfo
from tests.parts.inference.models import publication


@dataclass
class VllmStandIn:
    url: str = ""
    version: str = "1"
    is_paused: bool = False
    weights: str = "1"
    loaded: list[str] = field(default_factory=list)
    hanging: set[str] = field(default_factory=set)
    """Paths that do not respond."""
    failing: set[str] = field(default_factory=set)
    """Paths that respond with 500. Weights are loaded nevertheless."""
    load_s: float = 0.0
    load_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def handle(self, request: web.Request) -> web.Response:
        if request.path in self.hanging:
            await asyncio.Event().wait()
        body = await request.json() if request.can_read_body else {}
        response = web.json_response({})
        match request.path:
            case "/pause" | "/resume":
                self.is_paused = request.path == "/pause"
            case "/collective_rpc":
                self.weights = body["kwargs"]["weights_path"]
            case "/update_weight_version" if request.path not in self.failing:
                self.version = body["new_version"]
            case "/weight_info":
                response = web.json_response({"weight_version": self.version})
            case "/v1/models":
                response = web.json_response({"data": [{"id": name} for name in self.loaded]})
            case "/v1/load_lora_adapter":
                response = await self._load(body["lora_name"])
            case "/v1/unload_lora_adapter":
                response = web.json_response({}, status=200 if body["lora_name"] in self.loaded else 404)
        return web.Response(status=500, text="failed") if request.path in self.failing else response

    async def _load(self, name: str) -> web.Response:
        async with self.load_lock:
            if name in self.loaded:
                return web.json_response(
                    {"error": {"message": "already loaded", "type": "Bad", "code": 400}}, status=400
                )
            await asyncio.sleep(self.load_s)
            self.loaded.append(name)
            return web.json_response({})


@pytest.fixture
async def server() -> AsyncIterator[VllmStandIn]:
    stand_in = VllmStandIn()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.handle)
    sock = listening_socket("127.0.0.1", 0)
    # As vLLM does: an update continues although its client has disconnected.
    async with serve_app(app, sock, drain_s=0.1, is_cancelled_on_disconnect=False) as stand_in.url:
        yield stand_in


@asynccontextmanager
async def connected(server: VllmStandIn) -> AsyncIterator[PolicyConnection]:
    async with open_connection(server.url, max_connections=4) as connection:
        yield connection


async def test_a_push_to_a_server_that_hangs_ends_with_its_deadline(
    server: VllmStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_client, "RECOVERY_S", 0.2)
    server.hanging = {"/collective_rpc", "/update_weight_version", "/resume"}
    async with WeightTransferClient([server.url], request_s=0.5, server_api=VllmServerApi()) as client:
        async with asyncio.timeout(20):
            with pytest.raises(TransientError):
                await client.receive(publication(2, "d"), str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version"])
async def test_after_a_failed_update_no_token_gets_the_version_of_the_old_weights(
    server: VllmStandIn, path: str, tmp_path: Path
) -> None:
    info = update_message(publication(2, "d"), "directory", path=str(tmp_path / "model.safetensors"))
    server_api = VllmServerApi()
    server.failing = {path}
    async with connected(server) as replica:
        assert server_api.exactness(replica).inexact_because == "vLLM computes with kernels of its own"
        with pytest.raises(TransientError, match="failed"):
            await server_api.update(replica, info)
        assert server.weights == str(tmp_path)
        assert server.is_paused or await server_api.publication(replica) is None
        server.failing.clear()
        await server_api.update(replica, info)
        await server_api.require(replica, publication(2, "d"), dtype=None)
        assert not server.is_paused


async def test_an_adapter_that_a_repeated_update_finds_loaded_is_accepted(server: VllmStandIn, tmp_path: Path) -> None:
    server.load_s = 1.0
    adapter = AdapterInfo(name="policy-v2", settings={})
    info = update_message(publication(2, "d"), "directory", path=str(tmp_path / "adapter.safetensors"), adapter=adapter)
    server_api = VllmAdapterServerApi()
    async with connected(server) as replica:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await server_api.update(replica, info)
        await server_api.update(replica, info)
        await server_api.require(replica, publication(2, "d"), dtype=None)


async def test_an_adapter_that_was_unloaded_meanwhile_does_not_fail_the_update(server: VllmStandIn) -> None:
    async with connected(server) as replica:
        await VllmAdapterServerApi()._unload_idle(replica, {1, 2, 3})
