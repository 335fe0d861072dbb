"""The policy client and the weight client against real servers: retries, deadlines, lost connections, restarts, updates."""

import asyncio
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, FencedError, RunError, TransientError
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams, TokenChunk, joined_chunks
from rollbook.inference.client.client import PolicyClient, open_policy_client
from rollbook.inference.client.token_stream import SETTLED_AT_ONCE
from rollbook.inference.config import ScriptedConfig
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.wire.completions import TokenCompletion
from rollbook.inference.wire.token_stream import (
    STREAM_PATH,
    ClientFrame,
    ServerFrame,
    StreamedError,
    StreamedOutcome,
    StreamedRequest,
    StreamedTokens,
)
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
    paths: list[str] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[PolicyClient, Engine, str]]:
    """`paths` collects the requested paths."""

    @web.middleware
    async def collect(request: web.Request, handler: Handler) -> web.StreamResponse:
        if paths is not None:
            paths.append(request.path)
        return await handler(request)

    async with tiny.engine(name, published=published, **settings) as engine:
        app = build_app(engine, engine_config(name, **settings))
        app.middlewares.append(collect)
        async with serve(app) as url, open_policy_client(url, request_s=20) as client:
            yield client, engine, url


@asynccontextmanager
async def scripted_server(*responses: Any) -> AsyncIterator[tuple[str, list[StreamedRequest]]]:
    """A server with these responses in turn (the last one repeats). Yields its URL and the received requests.

    A response is an outcome without its id, bytes of a frame, "disconnect", two of these, or the status of a refused connection.
    """
    received: list[StreamedRequest] = []
    script = list(responses)

    async def connect(request: web.Request) -> web.StreamResponse:
        if isinstance(script[0], int):
            status = script.pop(0) if len(script) > 1 else script[0]
            return web.Response(status=status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            for one in msgspec.msgpack.decode(message.data, type=ClientFrame).requests:
                received.append(one)
                planned = script.pop(0) if len(script) > 1 else script[0]
                if isinstance(planned, tuple):
                    first, planned = planned
                    await socket.send_bytes(first)
                if planned == "disconnect":
                    assert request.transport is not None
                    request.transport.abort()
                elif isinstance(planned, bytes):
                    await socket.send_bytes(planned)
                else:
                    await socket.send_bytes(msgspec.msgpack.encode(ServerFrame([planned(one.id)])))
        return socket

    app = web.Application()
    app.router.add_get(STREAM_PATH, connect)
    async with serve(app) as url:
        yield url, received


Response = Callable[[int], StreamedOutcome]


def reply(*tokens: int, num_versions: int | None = None) -> Response:
    completion = TokenCompletion(
        np.array(tokens, np.int32).data,
        np.full(len(tokens), -1.0, np.float32).data,
        np.full(len(tokens) if num_versions is None else num_versions, 3, np.int32).data,
        FinishReason.LENGTH,
    )
    return lambda number: StreamedOutcome(number, completion)


def failure(status: int) -> Response:
    return lambda number: StreamedOutcome(number, None, StreamedError(status, b"{}", None))


async def test_a_completion_has_the_logprobs_and_version_of_the_engine(tiny: TinyModel) -> None:
    async with opened(tiny, "transformers") as (client, _, _):
        for sampling in (SamplingParams(max_tokens=5, seed=3), SamplingParams(max_tokens=40, seed=3)):
            completion = await client.complete([1, 2, 3], sampling)
            expected = plain_logprobs(tiny.model(1), [1, 2, 3, *completion.token_ids.tolist()], 3)
            assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            assert set(completion.versions.tolist()) == {1}


async def test_many_requests_share_a_connection_and_each_gets_its_own_completion(tiny: TinyModel) -> None:
    seeds = range(300)
    paths: list[str] = []
    async with opened(tiny, paths=paths) as (client, _, url):
        sampled = await asyncio.gather(
            *(client.complete([seed % VOCAB], SamplingParams(max_tokens=1 + seed % 40, seed=seed)) for seed in seeds)
        )
        assert paths == [STREAM_PATH]
        async with open_policy_client(url, request_s=20) as other:
            for seed in (0, 7, 299):
                alone = await other.complete([seed % VOCAB], SamplingParams(max_tokens=1 + seed % 40, seed=seed))
                assert sampled[seed].token_ids.tolist() == alone.token_ids.tolist()


async def test_a_frame_with_many_completions_does_not_hold_up_the_event_loop(tiny: TinyModel) -> None:
    turns_of_loop, ended_in = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turns_of_loop
        while True:
            turns_of_loop += 1
            await asyncio.sleep(0)

    async def request(client: PolicyClient) -> None:
        await client.complete([1, 2], ONE)
        ended_in[turns_of_loop] += 1

    async with opened(tiny, max_running=1000, scripted=ScriptedConfig(token_s=0.5)) as (client, _, _):
        counting = asyncio.create_task(count_turns())
        await asyncio.gather(*(request(client) for _ in range(500)))
        counting.cancel()
    assert ended_in.total() == 500
    assert max(ended_in.values()) <= 2 * SETTLED_AT_ONCE


async def test_an_invalid_prompt_does_not_affect_other_requests(tiny: TinyModel) -> None:
    async with opened(tiny) as (client, _, _):
        prompts = [[1], [2], [VOCAB + 5], [3], []]
        outcomes = await asyncio.gather(*(client.complete(p, ONE) for p in prompts), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Completion, Completion, EpisodeError, Completion, EpisodeError]
    assert "vocabulary" in str(outcomes[2])


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("disconnect", id="disconnect"),
        pytest.param(b"not a frame", id="invalid frame"),
        pytest.param(503, id="connection refused"),
        pytest.param(failure(500), id="server error"),
        pytest.param(failure(503), id="unavailable"),
        pytest.param(reply(4, 5, num_versions=1), id="arrays of different lengths"),
    ],
)
async def test_a_transient_failure_is_retried(first: Any) -> None:
    async with (
        scripted_server(first, first, reply(4)) as (url, _),
        open_policy_client(url, request_s=20) as client,
    ):
        completion = await client.complete([1], ONE)
    assert completion.token_ids.tolist() == [4]
    assert completion.versions.tolist() == [3]


async def test_streamed_tokens_arrive_as_they_are_sampled_and_make_up_the_completion(tiny: TinyModel) -> None:
    chunks: list[TokenChunk] = []
    async with opened(tiny, "transformers") as (client, _, _):
        sampling = SamplingParams(max_tokens=12, seed=3, top_logprobs=2)
        completion = await client.complete([1, 2, 3], sampling, on_tokens=chunks.append)
    assert len(chunks) == 12
    streamed = joined_chunks(chunks)
    assert streamed.token_ids.tolist() == completion.token_ids.tolist()
    assert streamed.logprobs.tolist() == completion.logprobs.tolist()
    assert streamed.versions.tolist() == completion.versions.tolist()
    assert streamed.tops is not None
    assert completion.tops is not None
    assert streamed.tops.token_ids.tolist() == completion.tops.token_ids.tolist()


async def test_streamed_tokens_cross_the_wire_once(tiny: TinyModel) -> None:
    sampling = SamplingParams(max_tokens=12, seed=3)
    async with (
        opened(tiny, "transformers") as (_, _, url),
        aiohttp.ClientSession() as session,
        session.ws_connect(url + STREAM_PATH) as socket,
    ):
        request = StreamedRequest.of(1, [1, 2, 3], sampling, min_publication=0, is_streamed=True)
        await socket.send_bytes(msgspec.msgpack.encode(ClientFrame([request], [])))
        frames: list[ServerFrame] = []
        while not any(frame.outcomes for frame in frames):
            frames.append(msgspec.msgpack.decode((await socket.receive()).data, type=ServerFrame))
    outcome = frames[-1].outcomes[0]
    assert outcome.completion is not None
    in_chunks = sum(len(tokens.to_contract().token_ids) for frame in frames for tokens in frame.tokens)
    assert (in_chunks, outcome.num_streamed) == (12, 12)
    assert len(outcome.completion.to_contract().token_ids) == 0


async def test_a_token_callback_that_raises_fails_its_own_request_only(tiny: TinyModel) -> None:
    def broken(_: TokenChunk) -> None:
        raise RuntimeError("the reader is gone")

    async with opened(tiny, scripted=ScriptedConfig(token_s=0.005)) as (client, engine, _):
        other = asyncio.create_task(client.complete([1], SamplingParams(max_tokens=50)))
        await until(lambda: engine.stats().running == 1)
        with pytest.raises(RuntimeError, match="the reader is gone"):
            await client.complete([2], LONG, on_tokens=broken)
        assert len((await other).token_ids) == 50
        assert len((await client.complete([3], ONE)).token_ids) == 1
        await until(lambda: engine.stats().running == 0)


async def test_streamed_tokens_are_kept_when_the_connection_is_lost_after_them() -> None:
    """An episode continues from them. Sampling them again would contradict what the agent has seen."""
    tokens = TokenChunk(
        token_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-1, -2], np.float32),
        versions=np.array([3, 3], np.int32),
    )
    frame = msgspec.msgpack.encode(ServerFrame([], [StreamedTokens.of(1, tokens)]))
    async with (
        scripted_server((frame, "disconnect"), reply(9)) as (url, received),
        open_policy_client(url, request_s=20) as client,
    ):
        completion = await client.complete([1], LONG, on_tokens=lambda _: None)
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([7, 8], FinishReason.ABORT)
    assert len(received) == 1


async def test_a_stream_that_differs_from_its_completion_ends_the_episode_and_is_not_requested_again() -> None:
    """Otherwise an episode would be trained on tokens that the policy did not sample."""
    sampled = Completion(
        token_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-1, -2], np.float32),
        versions=np.array([3, 3], np.int32),
        finish_reason=FinishReason.STOP,
    )
    other = TokenChunk(token_ids=np.array([7, 9], np.int32), logprobs=sampled.logprobs, versions=sampled.versions)
    frame = msgspec.msgpack.encode(
        ServerFrame([StreamedOutcome.of(1, sampled, num_streamed=2)], [StreamedTokens.of(1, other)])
    )
    async with (
        scripted_server(frame) as (url, received),
        open_policy_client(url, request_s=20) as client,
    ):
        with pytest.raises(EpisodeError, match="are not the 2 that were sampled"):
            await client.complete([1], LONG, on_tokens=lambda _: None)
    assert len(received) == 1


async def test_a_lost_connection_fails_no_request_that_can_be_sent_again() -> None:
    async with (
        scripted_server(reply(1), "disconnect", reply(2)) as (url, received),
        open_policy_client(url, request_s=20) as client,
    ):
        sampled = await asyncio.gather(*(client.complete([n], ONE) for n in range(20)))
    assert {int(completion.token_ids[0]) for completion in sampled} == {1, 2}
    assert len(received) > 20


@pytest.mark.parametrize(("status", "expected"), [(400, EpisodeError), (404, RunError), (401, RunError)])
async def test_a_client_error_is_never_retried(status: int, expected: type[Exception]) -> None:
    async with (
        scripted_server(failure(status)) as (url, received),
        open_policy_client(url, request_s=20) as client,
    ):
        with pytest.raises(expected, match=str(status)):
            await client.complete([1], ONE)
    assert len(received) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refused_connection_is_an_error_of_the_run(status: int) -> None:
    async with scripted_server(status) as (url, _), open_policy_client(url, request_s=20) as client:
        with pytest.raises(RunError, match=str(status)):
            await client.complete([1], ONE)


async def test_an_invalid_frame_closes_the_connection_and_its_requests_are_cancelled(tiny: TinyModel) -> None:
    async with (
        opened(tiny, scripted=ScriptedConfig(token_s=0.05)) as (_, engine, url),
        aiohttp.ClientSession() as session,
        session.ws_connect(url + STREAM_PATH) as socket,
    ):
        request = StreamedRequest.of(1, [1], LONG, min_publication=0)
        await socket.send_bytes(msgspec.msgpack.encode(ClientFrame([request], [])))
        await until(lambda: engine.stats().running == 1)
        await socket.send_bytes(b"\xc1")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: engine.stats().running == 0)


async def test_the_requests_of_a_client_that_does_not_answer_a_close_or_breaks_off_are_cancelled(
    tiny: TinyModel,
) -> None:
    async with (
        opened(tiny, scripted=ScriptedConfig(token_s=0.05)) as (_, engine, url),
        aiohttp.ClientSession() as session,
    ):
        requests = [StreamedRequest.of(number, [1], LONG, min_publication=0) for number in range(3)]
        frame = msgspec.msgpack.encode(ClientFrame(requests, []))
        silent = await session.ws_connect(url + STREAM_PATH, autoclose=False)
        await silent.send_bytes(frame)
        await until(lambda: engine.stats().running == len(requests))
        await silent.send_bytes(b"\xc1")
        await until(lambda: engine.stats().running == 0)
        broken = await session.ws_connect(url + STREAM_PATH)
        await broken.send_bytes(frame)
        await until(lambda: engine.stats().running == len(requests))
        broken.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        await until(lambda: engine.stats().running == 0)


async def test_completions_that_end_shortly_after_each_other_share_frames(tiny: TinyModel) -> None:
    count = 60
    async with (
        opened(tiny, scripted=ScriptedConfig(token_s=0)) as (_, _, url),
        aiohttp.ClientSession() as session,
        session.ws_connect(url + STREAM_PATH) as socket,
    ):
        requests = [
            StreamedRequest.of(tokens, [1], SamplingParams(max_tokens=tokens), min_publication=0)
            for tokens in range(1, count + 1)
        ]
        await socket.send_bytes(msgspec.msgpack.encode(ClientFrame(requests, [])))
        frames: list[list[int]] = []
        while sum(map(len, frames)) < count:
            message = await socket.receive()
            frames.append([outcome.id for outcome in msgspec.msgpack.decode(message.data, type=ServerFrame).outcomes])
    assert [number for frame in frames for number in frame] == list(range(1, count + 1)), (
        "in the order in which they end"
    )
    assert len(frames) < count / 2


async def test_a_stopping_server_sends_the_outcomes_that_are_ready(tiny: TinyModel) -> None:
    async with tiny.engine("scripted", published=1) as engine, AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve(build_app(engine, engine_config("scripted"))))
        async with aiohttp.ClientSession() as session, session.ws_connect(url + STREAM_PATH) as socket:
            request = StreamedRequest.of(1, [1], ONE, min_publication=0)
            await socket.send_bytes(msgspec.msgpack.encode(ClientFrame([request], [])))
            message = await socket.receive()
            assert msgspec.msgpack.decode(message.data, type=ServerFrame).outcomes[0].id == 1
            stopping = asyncio.create_task(stack.aclose())
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
            await stopping


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


async def test_cancelling_a_request_frees_its_slot_on_the_server(tiny: TinyModel) -> None:
    async with opened(tiny, scripted=ScriptedConfig(token_s=0.05)) as (client, engine, _):
        task = asyncio.create_task(client.complete([1], LONG))
        await until(lambda: engine.stats().tokens >= 1)
        task.cancel()
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().tokens < LONG.max_tokens


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
