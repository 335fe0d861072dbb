"""What every way of moving weights promises: all replicas get exactly what was published, in flight; old epochs are refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollbook.contracts.errors import FencedError, TransientError
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.config import UpdateSequence
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.server_api import OwnVerbs
from rollbook.inference.weights.transport import WayPlace, open_way
from rollbook.trainer.model.weights import digest_of, named_weights
from tests.parts.inference.engines import Workshop, engine_config, until
from tests.parts.inference.models import publication

LONG = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(root=tmp_path_factory.mktemp("transfer"))


@pytest.fixture(params=["directory", "shared_memory", "gloo"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Two replicas, a trainer's end, and switches that make the second replica, or both, unreachable."""

    client: WeightTransferClient
    engines: list[Engine]
    workshop: Workshop
    cut: set[int]
    verbs: list[str]

    def published(self, number: int, *, epoch: int = 1) -> tuple[Publication, dict[str, Any]]:
        weights = named_weights(self.workshop.model(number))
        return publication(number, digest_of(weights), epoch=epoch), weights

    async def push(self, number: int, *, epoch: int = 1) -> Publication:
        offered, weights = self.published(number, epoch=epoch)
        await self.client.receive(offered, await self.client.put(offered, weights))
        return offered


@asynccontextmanager
async def bench(
    workshop: Workshop, way: str, tmp_path: Path, *, engine: str = "transformers", **settings: Any
) -> AsyncIterator[Bench]:
    cut, verbs = set[int](), list[str]()
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for number in range(2):

            @web.middleware
            async def note(request: web.Request, handler: Handler, number: int = number) -> web.StreamResponse:
                verbs.append(f"{number}{request.path}")
                if number in cut:
                    return web.Response(status=502)
                return await handler(request)

            opened = await stack.enter_async_context(workshop.engine(engine, published=None))
            app = build_app(opened, engine_config(engine))
            app.middlewares.append(note)
            engines.append(opened)
            urls.append(await stack.enter_async_context(serve(app)))
        place = WayPlace(directory=str(tmp_path / "weights"), timeout_s=20)
        client = await stack.enter_async_context(
            WeightTransferClient(urls, **{"request_s": 30, "way": open_way(way, place), **settings})
        )
        yield Bench(client=client, engines=engines, workshop=workshop, cut=cut, verbs=verbs)


async def test_every_replica_uses_exactly_the_published_bytes(workshop: Workshop, way: str, tmp_path: Path) -> None:
    async with bench(workshop, way, tmp_path) as b:
        for number in (1, 2):
            published = await b.push(number)
            assert [engine.publication for engine in b.engines] == [published, published]
            assert [await engine.weights_digest() for engine in b.engines] == [published.digest] * 2
            assert list(await b.client.reported()) == [published, published]


async def test_pushing_again_changes_nothing_and_an_old_epoch_is_refused(
    workshop: Workshop, way: str, tmp_path: Path
) -> None:
    async with bench(workshop, way, tmp_path) as b:
        newest = await b.push(3, epoch=2)
        assert await b.push(3, epoch=2) == newest
        with pytest.raises(FencedError):
            await b.push(4, epoch=1)
        assert list(await b.client.reported()) == [newest, newest]
        assert (await b.push(5, epoch=2)).id == 5


async def test_weights_move_while_requests_run_and_each_token_is_stamped(
    workshop: Workshop, way: str, tmp_path: Path
) -> None:
    async with bench(workshop, way, tmp_path) as b:
        await b.push(1)
        for number in range(2, 14):
            running = [engine.submit([1, 2, 3], LONG) for engine in b.engines]
            await until(lambda: all(engine.stats().running for engine in b.engines))
            await b.push(number)
            versions = [(await answer).versions for answer in running]
            assert all((np.diff(stamps) >= 0).all() for stamps in versions)
            if any(set(stamps.tolist()) == {number - 1, number} for stamps in versions):
                return
        raise AssertionError("no update ever arrived while a request was running")


async def test_the_paused_sequence_holds_every_replica_until_all_have_the_weights(
    workshop: Workshop, way: str, tmp_path: Path
) -> None:
    async with bench(workshop, way, tmp_path, engine="scripted", sequence=UpdateSequence.PAUSED) as b:
        await b.push(1)
        del b.verbs[:]
        await b.push(2)
        order = [verb[1:] for verb in b.verbs if verb[1:] in ("/pause", "/update_weights", "/resume")]
        assert order == ["/pause"] * 2 + ["/update_weights"] * 2 + ["/resume"] * 2
        assert not any(engine.is_paused for engine in b.engines)
        with pytest.raises(FencedError):
            await b.push(1)
        assert not any(engine.is_paused for engine in b.engines)


async def test_a_replica_that_cannot_be_reached_is_quarantined_and_brought_up_to_date(
    workshop: Workshop, way: str, tmp_path: Path
) -> None:
    async with bench(workshop, way, tmp_path, engine="scripted", confirm_s=3.0) as b:
        await b.push(1)
        b.cut.add(1)
        second = await b.push(2)
        assert b.client.quarantined
        assert [engine.publication.id for engine in b.engines if engine.publication] == [2, 1]
        assert list(await b.client.reported()) == [second]
        # While it is away it holds nobody up.
        third = await b.push(3)
        b.cut.clear()
        told = await b.client.reported()
        assert [None if p is None else p.id for p in told] == [3, 1]
        assert not b.client.quarantined
        await b.push(3)
        assert list(await b.client.reported()) == [third, third]


async def test_when_no_replica_can_be_reached_nothing_is_quarantined_and_the_trainer_is_told(
    workshop: Workshop, way: str, tmp_path: Path
) -> None:
    async with bench(workshop, way, tmp_path, engine="scripted") as b:
        await b.push(1)
        place = WayPlace(directory=str(tmp_path / "elsewhere"), timeout_s=5)
        gone = "http://127.0.0.1:9"
        async with WeightTransferClient([gone], request_s=0.4, way=open_way(way, place)) as client:
            offered, weights = b.published(2)
            with pytest.raises(TransientError):
                await client.receive(offered, await client.put(offered, weights))
            assert client.quarantined == ()


async def test_while_no_replica_can_take_weights_none_is_blamed_and_the_push_goes_on_within_its_budget(
    workshop: Workshop, tmp_path: Path
) -> None:
    async with bench(workshop, "directory", tmp_path, engine="scripted", confirm_s=4.0) as b:
        await b.push(1)
        b.cut.update({0, 1})
        offered, weights = b.published(2)
        location = await b.client.put(offered, weights)
        pushing = asyncio.create_task(b.client.receive(offered, location, within_s=60))
        await asyncio.sleep(4.5)  # longer than a single one of them would have been waited for
        assert not pushing.done()
        b.cut.clear()
        await pushing
        assert b.client.quarantined == ()
        assert [engine.publication for engine in b.engines] == [offered, offered]


async def test_replicas_that_know_no_epochs_get_nothing_from_a_trainer_that_was_replaced(
    workshop: Workshop, tmp_path: Path
) -> None:
    class Trusting(OwnVerbs):
        refuses_old_epochs = False

    asked = []

    async def fence() -> None:
        asked.append("ledger")
        raise FencedError("a newer trainer has the role")

    async with bench(workshop, "directory", tmp_path, engine="scripted", verbs=Trusting()) as b:
        first = await b.push(1)
        offered, weights = b.published(2)
        with pytest.raises(FencedError, match="newer trainer"):
            await b.client.receive(offered, await b.client.put(offered, weights), within_s=30, fence=fence)
        assert asked
        assert [engine.publication for engine in b.engines] == [first, first]


async def test_what_is_no_longer_needed_is_let_go(workshop: Workshop, way: str, tmp_path: Path) -> None:
    async with bench(workshop, way, tmp_path, engine="scripted") as b:
        offered, weights = b.published(1)
        first = await b.client.put(offered, weights)
        offered, weights = b.published(2)
        second = await b.client.put(offered, weights)
        await b.client.keep_only([second])
        await b.client.receive(offered, second)
        assert way == "gloo" or (not Path(first).exists() and Path(second).exists())
    assert way != "shared_memory" or not Path(second).parent.parent.exists()


async def test_a_transfer_that_changed_a_byte_is_noticed(workshop: Workshop, way: str, tmp_path: Path) -> None:
    """The digest of the weights in use is compared with the published one, after every transfer."""
    async with bench(workshop, way, tmp_path, confirm_s=2.0, request_s=2.0) as b:
        await b.push(1)
        model: Any = b.engines[0]
        digest = model.weights_digest

        async def wrong() -> str:
            await digest()
            return "0" * 32

        model.weights_digest = wrong
        offered = await b.push(2)
        assert b.client.quarantined != ()
        assert b.engines[1].publication == offered
