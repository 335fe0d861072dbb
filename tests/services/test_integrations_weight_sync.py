"""A blocking trainer pushes weights to a policy server whose replies get lost."""

import asyncio
import tempfile
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import RunError, TransientError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.integrations.weight_sync import SyncWeightTransferClient


async def test_the_update_after_a_failed_one_has_a_number_of_its_own() -> None:
    """The server has loaded the weights of the failed update, so it refuses other weights with the same number."""
    are_replies_lost = False

    @web.middleware
    async def lose_replies(request: web.Request, handler: Handler) -> web.StreamResponse:
        reply = await handler(request)
        return web.Response(status=503) if are_replies_lost else reply

    def train() -> int:
        nonlocal are_replies_lost
        with SyncWeightTransferClient([url], request_s=1.0) as weights:
            are_replies_lost = True
            with pytest.raises(TransientError):
                weights.update({"w": torch.zeros(2, 2)})
            are_replies_lost = False
            return weights.update({"w": torch.ones(2, 2)})

    config = InferenceConfig(engine="scripted")
    async with open_engine(config, Path()) as engine:
        app = build_app(engine, config)
        app.middlewares.append(lose_replies)
        async with serve(app) as url:
            assert await asyncio.to_thread(train) == 1
        publication = engine.publication
    assert publication is not None
    assert (publication.id, publication.step) == (2, 1)


def test_a_client_that_cannot_connect_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with listening_socket("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    client = SyncWeightTransferClient([url], request_s=0.2)
    with pytest.raises(TransientError):
        client.init()
    assert list(tmp_path.iterdir()) == []


async def test_pause_resume_and_destroy_do_what_their_names_say() -> None:
    """A paused server reports it. A destroyed client has resumed what it paused, and refuses further work."""
    config = InferenceConfig(engine="scripted")

    async def is_paused(http: ClientSession, url: str) -> bool:
        async with http.get(f"{url}/is_paused") as answer:
            return bool((await answer.json())["is_paused"])

    async with (
        open_engine(config, Path()) as engine,
        serve(build_app(engine, config)) as url,
        ClientSession() as http,
        WeightTransferClient([url], request_s=5.0) as client,
    ):
        seen = [await is_paused(http, url)]
        for act in (client.pause, client.resume, client.pause, client.destroy, client.destroy):
            await act()
            seen.append(await is_paused(http, url))
        assert seen == [False, True, False, True, False, False]
        for act in (client.pause, client.resume):
            with pytest.raises(RunError, match="was destroyed"):
                await act()


async def test_a_trainer_of_another_project_pushes_to_servers_without_a_shared_disk() -> None:
    token = "a-token-of-at-least-sixteen-characters"

    def train() -> int:
        with SyncWeightTransferClient([url], token=token, transfer="pull", request_s=20.0) as weights:
            weights.update({"w": torch.zeros(2, 2)})
            return weights.update({"w": torch.ones(2, 2)})

    config = InferenceConfig(engine="scripted")
    async with open_engine(config, Path()) as engine, serve(build_app(engine, config, steering_token=token)) as url:
        assert await asyncio.to_thread(train) == 2
        assert engine.publication is not None
        assert engine.publication.step == 2
