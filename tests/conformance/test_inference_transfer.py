"""Every transport delivers exactly the published weights to all replicas, in flight, and refuses old epochs."""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.config import UpdateSequence
from rollbook.inference.connection import PolicyConnection, open_connection
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.node_copies import NodeCopies
from rollbook.inference.weights.server_api import RollbookServerApi
from rollbook.inference.weights.transport import TransportOptions, WeightTransport, open_transport
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.model.weights import digest_of
from tests.parts.inference.engines import TinyModel, engine_config, until
from tests.parts.inference.models import publication

LONG = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("transfer"))


@pytest.fixture(params=["directory", "shared_memory", "pull"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two replicas, the trainer's client, and a set of replicas that respond with an error."""

    client: WeightTransferClient
    transport: WeightTransport
    engines: list[Engine]
    urls: list[str]
    tiny: TinyModel
    token: str
    unreachable: set[int]
    refusing: set[int]
    """These respond, and cannot store the weights."""
    requests: list[tuple[int, str]]
    """Replica and path of every request."""

    def published(self, number: int, *, epoch: int = 1) -> tuple[Publication, dict[str, Any]]:
        weights = named_weights(self.tiny.model(number))
        return publication(number, digest_of(weights), epoch=epoch), weights

    async def push(self, number: int, *, epoch: int = 1) -> Publication:
        offered, weights = self.published(number, epoch=epoch)
        await self.client.receive(offered, await self.client.put(offered, weights))
        return offered


@asynccontextmanager
async def two_replicas(
    tiny: TinyModel, name: str, tmp_path: Path, *, engine: str = "transformers", **settings: Any
) -> AsyncIterator[Setup]:
    unreachable, refusing, requests = set[int](), set[int](), list[tuple[int, str]]()
    token = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for number in range(2):

            @web.middleware
            async def record(request: web.Request, handler: Handler, number: int = number) -> web.StreamResponse:
                requests.append((number, request.path))
                if number in unreachable or (number in refusing and request.path == "/update_weights"):
                    return web.Response(status=502)
                return await handler(request)

            opened = await stack.enter_async_context(tiny.engine(engine, published=None))
            app = build_app(opened, engine_config(engine), steering_token=token)
            app.middlewares.append(record)
            engines.append(opened)
            urls.append(await stack.enter_async_context(serve(app)))
        transport = open_transport(name, TransportOptions(directory=str(tmp_path / "weights"), token=token))
        client = await stack.enter_async_context(
            WeightTransferClient(urls, **{"request_s": 30, "transport": transport, "api_key": token, **settings})
        )
        yield Setup(
            client=client,
            transport=transport,
            engines=engines,
            urls=urls,
            tiny=tiny,
            token=token,
            unreachable=unreachable,
            refusing=refusing,
            requests=requests,
        )


async def test_every_replica_uses_exactly_the_published_bytes(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    async with two_replicas(tiny, name, tmp_path) as setup:
        for number in (1, 2):
            published = await setup.push(number)
            assert [engine.publication for engine in setup.engines] == [published, published]
            assert [await engine.weights_digest() for engine in setup.engines] == [published.digest] * 2
            assert list(await setup.client.reported()) == [published, published]


async def test_pushing_again_changes_nothing_and_an_old_epoch_is_refused(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    async with two_replicas(tiny, name, tmp_path) as setup:
        newest = await setup.push(3, epoch=2)
        assert await setup.push(3, epoch=2) == newest
        with pytest.raises(FencedError):
            await setup.push(4, epoch=1)
        assert list(await setup.client.reported()) == [newest, newest]
        assert (await setup.push(5, epoch=2)).id == 5


async def test_weights_are_updated_during_running_requests_and_each_token_is_stamped(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    async with two_replicas(tiny, name, tmp_path) as setup:
        await setup.push(1)
        numbers = itertools.count(2)
        has_update_inside = False
        async with asyncio.timeout(60):
            while not has_update_inside:
                number = next(numbers)
                running = [engine.submit([1, 2, 3], LONG) for engine in setup.engines]
                await until(lambda: all(engine.stats().running for engine in setup.engines))
                await setup.push(number)
                versions = [(await future).versions for future in running]
                assert all((np.diff(stamps) >= 0).all() for stamps in versions)
                assert all(set(stamps.tolist()) <= {number - 1, number} for stamps in versions)
                has_update_inside = any(len(set(stamps.tolist())) == 2 for stamps in versions)


async def test_the_paused_sequence_pauses_every_replica_until_all_have_the_weights(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    async with two_replicas(tiny, name, tmp_path, engine="scripted", sequence=UpdateSequence.PAUSED) as setup:
        await setup.push(1)
        setup.requests.clear()
        await setup.push(2)
        order = [path for _, path in setup.requests if path in ("/pause", "/update_weights", "/resume")]
        assert order == ["/pause"] * 2 + ["/update_weights"] * 2 + ["/resume"] * 2
        assert not any(engine.is_paused for engine in setup.engines)
        with pytest.raises(FencedError):
            await setup.push(1)
        assert not any(engine.is_paused for engine in setup.engines)


async def test_a_replica_that_cannot_be_reached_is_quarantined_and_updated_later(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    async with two_replicas(tiny, name, tmp_path, engine="scripted", confirm_s=3.0) as setup:
        await setup.push(1)
        setup.unreachable.add(1)
        second = await setup.push(2)
        assert list(setup.client.quarantined) == [setup.urls[1]]
        assert [engine.publication.id for engine in setup.engines if engine.publication] == [2, 1]
        assert list(await setup.client.reported()) == [second]
        third = await setup.push(3)
        setup.unreachable.clear()
        reported = await setup.client.reported()
        assert [None if p is None else p.id for p in reported] == [3, 1]
        assert setup.client.quarantined == ()
        await setup.push(3)
        assert list(await setup.client.reported()) == [third, third]


async def test_a_replica_that_cannot_store_weights_delays_one_publication_and_not_all(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with two_replicas(tiny, "pull", tmp_path, engine="scripted", confirm_s=2.0) as setup:
        await setup.push(1)
        setup.refusing.add(1)
        await setup.push(2)
        assert list(setup.client.quarantined) == [setup.urls[1]]
        setup.client._confirm_s = 3600.0
        await setup.push(3)
        assert list(setup.client.quarantined) == [setup.urls[1]]
        setup.refusing.clear()
        fourth = await setup.push(4)
        assert list(await setup.client.reported()) == [fourth, fourth]
        assert setup.client.quarantined == ()


async def test_if_no_replica_can_be_reached_the_push_fails_and_none_is_quarantined(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    async with two_replicas(tiny, name, tmp_path, engine="scripted") as setup:
        await setup.push(1)
        options = TransportOptions(directory=str(tmp_path / "elsewhere"), token="token-of-another-run")
        transport = open_transport(name, options)
        closed_port = "http://127.0.0.1:9"
        async with WeightTransferClient([closed_port], request_s=0.4, transport=transport) as client:
            offered, weights = setup.published(2)
            with pytest.raises(TransientError):
                await client.receive(offered, await client.put(offered, weights))
            assert client.quarantined == ()


async def test_while_no_replica_accepts_weights_none_is_quarantined_and_the_push_is_retried_within_its_budget(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with two_replicas(tiny, "directory", tmp_path, engine="scripted", confirm_s=2.5) as setup:
        await setup.push(1)
        setup.unreachable.update({0, 1})
        setup.requests.clear()
        offered, weights = setup.published(2)
        location = await setup.client.put(offered, weights)
        pushing = asyncio.create_task(setup.client.receive(offered, location, within_s=120))
        # The shortest backoff before the ninth attempt is 3.5 s in all: longer than `confirm_s`.
        await until(
            lambda: min(Counter(number for number, _ in setup.requests).get(n, 0) for n in (0, 1)) >= 9, within_s=60
        )
        assert not pushing.done()
        setup.unreachable.clear()
        await pushing
        assert setup.client.quarantined == ()
        assert [engine.publication for engine in setup.engines] == [offered, offered]


async def test_replicas_that_do_not_know_epochs_get_no_weights_from_a_replaced_trainer(
    tiny: TinyModel, tmp_path: Path
) -> None:
    class WithoutEpochs(RollbookServerApi):
        refuses_old_epochs = False

    fence_checks = []

    async def fence() -> None:
        fence_checks.append("ledger")
        raise FencedError("a newer trainer has the role")

    async with two_replicas(tiny, "directory", tmp_path, engine="scripted", server_api=WithoutEpochs()) as setup:
        first = await setup.push(1)
        offered, weights = setup.published(2)
        with pytest.raises(FencedError, match="newer trainer"):
            await setup.client.receive(offered, await setup.client.put(offered, weights), within_s=30, fence=fence)
        assert fence_checks
        assert [engine.publication for engine in setup.engines] == [first, first]


async def test_weights_that_are_no_longer_needed_are_freed(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    async with two_replicas(tiny, name, tmp_path, engine="scripted") as setup:
        first, first_weights = setup.published(1)
        old = await setup.client.put(first, first_weights)
        offered, weights = setup.published(2)
        new = await setup.client.put(offered, weights)
        await setup.client.keep_only([new])
        await setup.client.receive(offered, new)
        assert Path(new).exists()
        assert not Path(old).exists()
    assert Path(new).parent.parent.exists() is (name == "directory")


async def test_weights_that_were_damaged_on_their_path_are_refused(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    async with two_replicas(tiny, name, tmp_path) as setup:
        first = await setup.push(1)
        offered, weights = setup.published(2)
        location = await setup.client.put(offered, weights)
        damaged = bytearray(Path(location).read_bytes())
        damaged[-1] ^= 1
        Path(location).write_bytes(damaged)
        with pytest.raises(RunError, match="announced with"):
            await setup.client.receive(offered, location)
        assert [engine.publication for engine in setup.engines] == [first, first]
        assert [await engine.weights_digest() for engine in setup.engines] == [first.digest] * 2


async def test_weights_that_changed_in_a_replicas_memory_are_noticed_by_their_digest(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with two_replicas(tiny, "directory", tmp_path) as setup:
        published = await setup.push(1)
        server_api = RollbookServerApi()
        async with open_connection(setup.urls[0], max_connections=1, api_key=setup.token) as replica:
            await server_api.require(replica, published, dtype="float32")
            damaged: Any = setup.engines[0]
            next(iter(damaged.parts.weights._targets.values())).add_(1.0)
            await server_api.require(replica, published, dtype=None)
            with pytest.raises(TransientError, match="uses weights with digest"):
                await server_api.require(replica, published, dtype="float32")


async def test_replicas_are_resumed_if_another_one_refuses_to_pause_or_the_push_is_cancelled(
    tiny: TinyModel, tmp_path: Path
) -> None:
    class Pausing(RollbookServerApi):
        """Pauses the first replica. The second one refuses, or does not respond."""

        is_refused = True

        async def pause(self, replica: PolicyConnection, mode: str) -> None:
            if replica.url == setup.urls[0]:
                await super().pause(replica, mode)
                return
            await until(lambda: setup.engines[0].is_paused)
            if not self.is_refused:
                await asyncio.Event().wait()
            raise RunError("403: the token is not accepted")

    server_api = Pausing()
    sequence = UpdateSequence.PAUSED
    async with two_replicas(
        tiny, "directory", tmp_path, engine="scripted", sequence=sequence, server_api=server_api
    ) as setup:
        with pytest.raises(RunError, match="not accepted"):
            await setup.push(1)
        assert not setup.engines[0].is_paused
        server_api.is_refused = False
        pushing = asyncio.create_task(setup.push(1))
        await until(lambda: setup.engines[0].is_paused)
        pushing.cancel()
        await asyncio.wait([pushing])
        assert not setup.engines[0].is_paused


async def test_weights_that_changed_in_a_replicas_memory_are_loaded_again_by_the_next_push(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with two_replicas(tiny, "directory", tmp_path) as setup:
        published, weights = setup.published(1)
        location = await setup.client.put(published, weights)
        await setup.client.receive(published, location)
        server_api = RollbookServerApi()
        damaged: Any = setup.engines[0]
        async with open_connection(setup.urls[0], max_connections=1, api_key=setup.token) as replica:
            next(iter(damaged.parts.weights._targets.values())).add_(1.0)
            with pytest.raises(TransientError, match="it is pushed again"):
                await server_api.require(replica, published, dtype="float32")
            await setup.client.receive(published, location)
            await server_api.require(replica, published, dtype="float32")


async def test_a_copy_that_was_damaged_on_its_machine_is_fetched_again(tiny: TinyModel, tmp_path: Path) -> None:
    async with two_replicas(tiny, "pull", tmp_path, engine="scripted", confirm_s=3.0) as setup:
        await setup.push(1)
        setup.refusing.add(1)
        await setup.push(2)
        with closing(NodeCopies(setup.token)) as copies:
            found = copies.find(2)
        assert found is not None
        damaged = bytearray(found[1].read_bytes())
        damaged[-1] ^= 1
        found[1].write_bytes(damaged)
        setup.refusing.clear()
        second = await setup.push(2)
        assert list(await setup.client.reported()) == [second, second]
