"""The policy client and the weight client against real servers: retries, deadlines, bundles, restarts, updates."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, FencedError, RunError, TransientError
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.inference.client.client import BUNDLE_MAX_TOKENS, PolicyClient, open_policy_client
from rollbook.inference.config import ScriptedConfig
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler, json_response
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.wire.completions import MSGPACK, TokenCompletion, TokenReply
from tests.parts.inference.engines import TinyModel, engine_config, until
from tests.parts.inference.models import VOCAB, plain_logprobs, publication
from tests.parts.inference.server_process import start_server

ONE = SamplingParams(max_tokens=1)
LONG = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("client"))


@asynccontextmanager
async def opened(
    tiny: TinyModel,
    name: str = "scripted",
    *,
    published: int | None = 1,
    posts: list[str] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[PolicyClient, Engine, str]]:
    """`posts` collects the requested paths."""

    @web.middleware
    async def collect(request: web.Request, handler: Handler) -> web.StreamResponse:
        if posts is not None:
            posts.append(request.path)
        return await handler(request)

    async with tiny.engine(name, published=published, **settings) as engine:
        app = build_app(engine, engine_config(name, **settings))
        app.middlewares.append(collect)
        async with serve(app) as url, open_policy_client(url, request_s=20) as client:
            yield client, engine, url


@asynccontextmanager
async def scripted_server(*responses: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server with these responses in turn (the last one repeats). Yields its URL and the received bodies."""
    received: list[Any] = []
    script = list(responses)

    async def handle(request: web.Request) -> web.StreamResponse:
        received.append(await request.json())
        planned = script.pop(0) if len(script) > 1 else script[0]
        if planned == "disconnect":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if planned == "incomplete body":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices":')
            assert request.transport is not None
            request.transport.close()
            return response
        if isinstance(planned, TokenReply):
            return web.Response(body=msgspec.msgpack.encode(planned), content_type=MSGPACK)
        status, body = planned
        return json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with serve(app) as url:
        yield url, received


def reply(*tokens: int) -> TokenReply:
    completion = Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1.0, np.float32),
        versions=np.full(len(tokens), 3, np.int32),
        finish_reason=FinishReason.LENGTH,
    )
    return TokenReply(completions=[TokenCompletion.of(completion)])


async def test_a_completion_has_the_logprobs_and_version_of_the_engine(tiny: TinyModel) -> None:
    async with opened(tiny, "transformers") as (client, _, _):
        for sampling in (SamplingParams(max_tokens=5, seed=3), SamplingParams(max_tokens=40, seed=3)):
            completion = await client.complete([1, 2, 3], sampling)
            expected = plain_logprobs(tiny.model(1), [1, 2, 3, *completion.token_ids.tolist()], 3)
            assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            assert set(completion.versions.tolist()) == {1}


async def test_many_short_requests_share_http_requests_and_each_gets_its_own_completion(tiny: TinyModel) -> None:
    seeds = range(300)
    posts: list[str] = []
    async with opened(tiny, posts=posts) as (client, _, url):
        sampled = await asyncio.gather(
            *(client.complete([seed % VOCAB], SamplingParams(max_tokens=3, seed=seed)) for seed in seeds)
        )
        assert len(posts) < 20
        async with open_policy_client(url, request_s=20) as other:
            for seed in (0, 7, 299):
                alone = await other.complete([seed % VOCAB], SamplingParams(max_tokens=3, seed=seed))
                assert sampled[seed].token_ids.tolist() == alone.token_ids.tolist()


async def test_an_invalid_prompt_in_a_bundle_does_not_affect_the_others(tiny: TinyModel) -> None:
    async with opened(tiny) as (client, _, _):
        prompts = [[1], [2], [VOCAB + 5], [3], []]
        outcomes = await asyncio.gather(*(client.complete(p, ONE) for p in prompts), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Completion, Completion, EpisodeError, Completion, EpisodeError]
    assert "vocabulary" in str(outcomes[2])


@pytest.mark.parametrize(
    "failure", ["disconnect", "incomplete body", (500, {"error": 1}), (503, {}), (200, {"not": "valid"})]
)
async def test_a_transient_failure_is_retried(failure: Any) -> None:
    async with (
        scripted_server(failure, failure, reply(4)) as (url, received),
        open_policy_client(url, request_s=20) as client,
    ):
        completion = await client.complete([1], ONE)
    assert completion.token_ids.tolist() == [4]
    assert completion.versions.tolist() == [3]
    assert len(received) >= 3


@pytest.mark.parametrize(("status", "expected"), [(400, EpisodeError), (404, RunError), (401, RunError)])
async def test_a_client_error_is_never_retried(status: int, expected: type[Exception]) -> None:
    async with scripted_server((status, {})) as (url, received), open_policy_client(url, request_s=20) as client:
        for sampling in (ONE, LONG):
            with pytest.raises(expected, match=str(status)):
                await client.complete([1], sampling)
    assert len(received) == 2


async def test_a_response_with_arrays_of_different_lengths_is_retried() -> None:
    broken = reply(4, 5)
    broken.completions[0].versions = np.array([3], np.int32).data
    async with scripted_server(broken, reply(6)) as (url, _), open_policy_client(url, request_s=20) as client:
        assert (await client.complete([1], ONE)).token_ids.tolist() == [6]


@pytest.mark.parametrize("sampling", [ONE, LONG])
async def test_an_expired_deadline_reports_the_last_error(sampling: SamplingParams) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with open_policy_client(url, request_s=0.3) as client:
            with pytest.raises(TransientError, match="is unreachable"):
                await client.complete([1], sampling)


async def test_a_shorter_deadline_of_the_caller_is_used(tiny: TinyModel) -> None:
    async with opened(tiny, published=None) as (client, _, _):
        # The error names the cause if no further attempt fits into the deadline, or the deadline if an attempt hangs.
        with pytest.raises(TransientError, match=r"stale_weights|within 0\.15 s"):
            await client.complete([1], ONE, timeout_s=0.15)


async def test_a_request_waits_for_the_weights_it_needs(tiny: TinyModel) -> None:
    async with opened(tiny) as (client, engine, _):
        waiting = asyncio.create_task(client.complete([1], ONE, min_publication=2))
        await client.complete([2], LONG)
        assert not waiting.done()
        await engine.load_weights(*tiny.weights(2))
        assert (await waiting).versions.tolist() == [2]


@pytest.mark.parametrize("max_tokens", [BUNDLE_MAX_TOKENS, 200])
async def test_cancelling_a_request_frees_its_slot_on_the_server(tiny: TinyModel, max_tokens: int) -> None:
    async with opened(tiny, scripted=ScriptedConfig(token_s=0.05)) as (client, engine, _):
        task = asyncio.create_task(client.complete([1], SamplingParams(max_tokens=max_tokens)))
        await until(lambda: engine.stats().tokens >= 1)
        task.cancel()
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().tokens < max_tokens


async def test_requests_survive_a_kill_and_restart_of_the_policy_server(tiny: TinyModel, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    first, url = await start_server(ready)
    port = int(url.rsplit(":", 1)[1])
    published, path = tiny.weights(1)
    second: subprocess.Popen[bytes] | None = None
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(open_policy_client(url, request_s=60))
            weights = await stack.enter_async_context(WeightTransferClient([url], request_s=60))
            await weights.receive(published, str(path))
            tasks = [asyncio.create_task(client.complete([n], SamplingParams(max_tokens=200))) for n in range(4)]
            tasks += [asyncio.create_task(client.complete([n], ONE)) for n in range(4)]
            await client.complete([9], ONE)
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            tasks.append(asyncio.create_task(client.complete([5], ONE)))
            second, _ = await start_server(ready, port)
            # It restarts without weights: nothing is sampled until they are pushed again.
            assert await weights.reported() == [None]
            assert not tasks[0].done()
            await weights.receive(published, str(path))
            assert all(len(completion.token_ids) > 0 for completion in await asyncio.gather(*tasks))
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


async def test_weights_reach_every_replica_and_are_reported(tiny: TinyModel) -> None:
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            _, _, url = await stack.enter_async_context(opened(tiny, published=None))
            urls.append(url)
        weights = await stack.enter_async_context(WeightTransferClient(urls, request_s=10))
        assert list(await weights.reported()) == [None, None]
        published, path = tiny.weights(3)
        await weights.receive(published, str(path))
        await weights.receive(published, str(path))
        assert list(await weights.reported()) == [published, published]
        older, older_path = tiny.weights(2)
        with pytest.raises(FencedError, match="publication 2"):
            await weights.receive(older, str(older_path))
        with pytest.raises(RunError, match="digest"):
            await weights.receive(publication(4, "0" * 32), str(path))
        assert list(await weights.reported()) == [published, published]


async def test_an_unreachable_replica_is_quarantined_but_never_the_last_one(tiny: TinyModel) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{unused.getsockname()[1]}"
        published, path = tiny.weights(2)
        async with opened(tiny) as (_, _, url), WeightTransferClient([url, unreachable], request_s=5) as weights:
            with pytest.raises(TransientError, match=unreachable):
                await weights.reported()
            await weights.receive(published, str(path))
            assert weights.quarantined == (unreachable,)
            assert list(await weights.reported()) == [published]
        async with WeightTransferClient([unreachable], request_s=0.3) as weights:
            # The error names the replica, or the publication if the deadline expires before the first attempt ends.
            with pytest.raises(TransientError, match=f"{unreachable}|publication 2"):
                await weights.receive(published, str(path))
            assert weights.quarantined == ()


async def test_the_trainer_can_pause_and_resume_all_replicas(tiny: TinyModel) -> None:
    async with opened(tiny) as (client, engine, url), WeightTransferClient([url], request_s=10) as weights:
        await weights.pause("wait")
        assert engine.is_paused
        waiting = asyncio.create_task(client.complete([1], ONE))
        await weights.resume()
        assert len((await waiting).token_ids) == 1
        assert not engine.is_paused
