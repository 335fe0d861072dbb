"""Several real replicas: when one is killed, draining or behind, the others complete its requests."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.client.client import PolicyClient, open_policy_client
from rollbook.inference.client.fleet import Fleet
from rollbook.inference.server.app import SERVICE, build_app, serve
from rollbook.inference.server.service import PolicyService
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.model.weights import digest_of
from tests.parts.inference.engines import TinyModel, engine_config, until
from tests.parts.inference.models import publication
from tests.parts.inference.server_process import start_server

TOKEN = "a-token-of-at-least-sixteen-characters"
LONG = SamplingParams(max_tokens=60)
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("fleet"))


async def test_all_requests_complete_when_one_of_two_replicas_is_killed_under_load(
    tiny: TinyModel, tmp_path: Path
) -> None:
    published, path = tiny.weights(1)
    (first, first_url), (second, second_url) = await asyncio.gather(
        start_server(tmp_path / "a"), start_server(tmp_path / "b")
    )
    try:
        async with AsyncExitStack() as stack:
            urls = [first_url, second_url]
            weights = await stack.enter_async_context(WeightTransferClient(urls, request_s=60))
            await weights.receive(published, str(path))
            client = await stack.enter_async_context(open_policy_client(urls, request_s=60, watch_s=0.1))
            tasks = [asyncio.create_task(client.complete([n % 30, n % 7], LONG if n % 2 else ONE)) for n in range(120)]
            await until(lambda: all(replica.completed for replica in client.fleet.replicas))
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            tasks += [asyncio.create_task(client.complete([n % 30, 3], LONG)) for n in range(60)]
            completions = await asyncio.gather(*tasks)
            assert [len(completion.token_ids) for completion in completions[-60:]] == [60] * 60
            assert len(completions) == 180
            # From now on the dead replica is not chosen, except for a probe now and then.
            homes = [f"episode-{number}" for number in range(20)]
            await until(lambda: {client.fleet.choose(session=home, min_publication=0) for home in homes} == {1})
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_weights_cross_processes_over_http_and_a_dead_replica_is_quarantined(
    tiny: TinyModel, tmp_path: Path
) -> None:
    (first, first_url), (second, second_url) = await asyncio.gather(
        start_server(tmp_path / "a", token=TOKEN), start_server(tmp_path / "b", token=TOKEN)
    )
    try:
        transport = open_transport("pull", TransportOptions(directory=str(tmp_path), token=TOKEN))
        urls = [first_url, second_url]
        async with WeightTransferClient(
            urls, request_s=120, confirm_s=30, transport=transport, api_key=TOKEN
        ) as client:
            for number in (1, 2):
                weights = named_weights(tiny.model(number))
                published = publication(number, digest_of(weights))
                await client.receive(published, await client.put(published, weights))
                assert list(await client.reported()) == [published, published]
            os.kill(second.pid, signal.SIGKILL)
            second.wait()
            weights = named_weights(tiny.model(3))
            published = publication(3, digest_of(weights))
            await client.receive(published, await client.put(published, weights))
            assert client.quarantined == (second_url,)
            assert list(await client.reported()) == [published]
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


@asynccontextmanager
async def two_replicas(
    tiny: TinyModel, *, published: tuple[int | None, int | None] = (1, 1)
) -> AsyncIterator[tuple[PolicyClient, list[str]]]:
    async with AsyncExitStack() as stack:
        urls = []
        for number in published:
            engine = await stack.enter_async_context(tiny.engine("scripted", published=number))
            app = build_app(engine, engine_config("scripted"))
            urls.append(await stack.enter_async_context(serve(app)))
        client = await stack.enter_async_context(open_policy_client(urls, request_s=30, watch_s=0.05))
        yield client, urls


def completed(fleet: Fleet) -> list[int]:
    return [replica.completed for replica in fleet.replicas]


async def test_the_turns_of_a_session_use_one_replica_and_sessions_use_all(tiny: TinyModel) -> None:
    episode = ["none"]
    async with AsyncExitStack() as stack:
        _, urls = await stack.enter_async_context(two_replicas(tiny))
        client = await stack.enter_async_context(open_policy_client(urls, request_s=30, session=lambda: episode[0]))
        homes: Counter[int] = Counter()
        for number in range(12):
            episode[0] = f"episode-{number}"
            before = completed(client.fleet)
            for turn in range(3):
                await client.complete([number, turn], SamplingParams(max_tokens=9))
            used = [now - then for now, then in zip(completed(client.fleet), before, strict=True)]
            assert sorted(used) == [0, 3]
            homes[used.index(3)] += 1
        assert set(homes) == {0, 1}


async def test_a_replica_with_older_weights_gets_no_request_that_requires_newer_ones(tiny: TinyModel) -> None:
    async with two_replicas(tiny, published=(1, 2)) as (client, _):
        await until(lambda: [replica.publication for replica in client.fleet.replicas] == [1, 2])
        completions = await asyncio.gather(*(client.complete([n], LONG, min_publication=2) for n in range(20)))
        assert {int(v) for completion in completions for v in completion.versions} == {2}
        assert completed(client.fleet)[0] == 0


def accepted(service: PolicyService) -> int:
    """Requests that the engine has, or has completed."""
    stats = service.engine.stats()
    return stats.running + stats.queued + stats.requests


async def test_a_draining_replica_finishes_its_requests_and_gets_no_new_ones(tiny: TinyModel) -> None:
    async with AsyncExitStack() as stack:
        urls, services = [], []
        for _ in range(2):
            engine = await stack.enter_async_context(tiny.engine("scripted"))
            app = build_app(engine, engine_config("scripted"))
            urls.append(await stack.enter_async_context(serve(app)))
            services.append(app[SERVICE])
        client = await stack.enter_async_context(open_policy_client(urls, request_s=30, watch_s=0.05))
        running = [asyncio.create_task(client.complete([n], SamplingParams(max_tokens=200))) for n in range(16)]
        # Otherwise requests that are on their way would arrive after the count below.
        await until(lambda: sum(map(accepted, services)) == 16)
        services[0].is_draining = True
        started = accepted(services[0])
        later = await asyncio.gather(*(client.complete([n, 1], LONG) for n in range(20)))
        assert len(later) == 20
        assert all(len(completion.token_ids) == 200 for completion in await asyncio.gather(*running))
        assert 0 < accepted(services[0]) <= started


async def test_a_publication_does_not_wait_for_a_replica_whose_lease_has_ended(tiny: TinyModel) -> None:
    published, path = tiny.weights(2)
    async with two_replicas(tiny, published=(1, 1)) as (_, (first, _)):
        with listening_socket("127.0.0.1", 0) as closed:
            lost = url_of(closed)
        lists = iter([[first, lost], [first, lost]])

        async def source() -> list[str]:
            return next(lists, [first])

        # Without the list, the lost replica would be quarantined an hour after the other one has the weights.
        async with WeightTransferClient([first, lost], request_s=3600, source=source) as weights:
            async with asyncio.timeout(120):
                await weights.receive(published, str(path))
            assert weights.quarantined == ()
            assert list(await weights.reported()) == [published]
            lists = iter([[first, lost], [first, lost]])
            async with asyncio.timeout(120):
                assert list(await weights.reported()) == [published], "nor does a report of all replicas"


async def test_requests_and_weights_follow_replicas_that_join_leave_and_return(tiny: TinyModel) -> None:
    published, path = tiny.weights(2)
    async with AsyncExitStack() as stack:
        _, (first, second) = await stack.enter_async_context(two_replicas(tiny, published=(1, None)))
        listed = [first]

        async def source() -> list[str]:
            if not listed:
                raise TransientError("the list is unknown")
            return listed

        weights = await stack.enter_async_context(WeightTransferClient([first], request_s=30, source=source))
        client = await stack.enter_async_context(open_policy_client([first], request_s=30, watch_s=0.05, source=source))
        fleet = client.fleet
        assert [found and int(found.id) for found in await weights.reported()] == [1]
        said = weights.exactness
        assert said is not None
        assert said.inexact_because == "the scripted engine has no model"
        listed.append(second)
        assert [found and int(found.id) for found in await weights.reported()] == [1, None], "the joiner has no weights"
        await weights.receive(published, str(path))
        assert list(await weights.reported()) == [published, published]
        await until(lambda: [replica.publication for replica in fleet.replicas] == [2, 2])
        sessions = [f"episode-{number}" for number in range(20)]

        def chosen() -> set[int]:
            return {fleet.choose(session=session, min_publication=2) for session in sessions}

        assert chosen() == {0, 1}
        listed[:] = [second]
        await until(lambda: chosen() == {1})
        assert fleet.urls == second
        assert list(await weights.reported()) == [published]
        listed.clear()
        assert list(await weights.reported()) == [published], "an unknown list changes nothing"
        listed[:] = [first, second]
        await until(lambda: chosen() == {0, 1})
        assert list(await weights.reported()) == [published, published]


async def test_a_publication_waits_while_no_replica_is_a_member(tiny: TinyModel) -> None:
    published, path = tiny.weights(2)
    async with two_replicas(tiny) as (_, urls):
        lists: Iterator[list[str]] = iter([[], []])

        async def source() -> list[str]:
            return next(lists, urls)

        async with WeightTransferClient(urls, request_s=30, source=source) as weights:
            with pytest.raises(TransientError, match="no policy server is a member of the run"):
                await weights.reported()
            await weights.receive(published, str(path))
            assert list(await weights.reported()) == [published, published]


async def test_a_publication_waits_while_the_only_member_is_quarantined(tiny: TinyModel) -> None:
    (published, path), (newer, newer_path) = tiny.weights(2), tiny.weights(3)
    async with two_replicas(tiny) as (_, (first, _)):
        lost = "http://127.0.0.1:9"
        lists: Iterator[list[str]] = iter([])

        async def source() -> list[str]:
            return next(lists, [first, lost])

        async with WeightTransferClient([first, lost], request_s=30, confirm_s=1.0, source=source) as weights:
            await weights.receive(published, str(path))
            assert weights.quarantined == (lost,)
            lists = iter([[lost], [lost]])
            await weights.receive(newer, str(newer_path), within_s=30)
            assert list(await weights.reported()) == [newer]
