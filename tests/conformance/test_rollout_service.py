"""A remote rollout service gives the same samples and errors as the local rollout function; invalid replies are refused."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents import rollout as proxied
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.policy import EpisodeContext, enter_episode
from rollbook.rollout.remote import client as service_client
from rollbook.rollout.remote.protocol import RolloutReply, RolloutRequest, TokenizerMismatchError, reply_of
from rollbook.rollout.remote.server import FunctionService, rollout_app, serve_rollouts
from tests.parts.rollout.agents import EngineRecord, agent_setup, assert_matches_engine

AGENT = {"agent": "tests.parts.rollout.agent_programs:converse", "reward": "tests.parts.rollout.agent_programs:reward"}
ROW: dict[str, Any] = {"questions": ["one?", "two?"], "answer": "two"}


def reply(prompt: str) -> str:
    return ("two" if "two?" in prompt else "one") + "<|im_end|>"


@asynccontextmanager
async def local_and_remote(
    tmp_path: Path, *, tokenizer_id: str | None = None, play: Callable[..., Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RolloutFn, RolloutFn, RolloutSetup, EngineRecord]]:
    """The same agent as a local function and behind HTTP, with one policy server."""
    async with agent_setup(tmp_path, reply, settings=AGENT) as (setup, record):
        local = proxied.make_rollout(setup)

        async def played(request: RolloutRequest) -> RolloutSample | None:
            return await local(request.row)

        service = FunctionService(tokenizer_id or setup.tokenizer.identity, play or played)
        async with serve_rollouts(service) as url:
            remote = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url, **settings}))
            yield local, remote, setup, record


def assert_same(left: RolloutSample, right: RolloutSample) -> None:
    for ours, theirs in zip(left.sequences, right.sequences, strict=True):
        for name in ("token_ids", "logprobs", "loss_mask", "versions"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert [(t.sequence, t.start, t.end) for t in left.turns] == [(t.sequence, t.start, t.end) for t in right.turns]
    for name in ("reward", "finish_reason", "solved", "sampling", "facts", "invalid_cause"):
        assert getattr(left, name) == getattr(right, name), name
    assert [dict(m) for m in left.messages or ()] == [dict(m) for m in right.messages or ()]


def hanging(began: asyncio.Event, ended: asyncio.Event) -> Callable[[RolloutRequest], Awaitable[None]]:
    """An episode that does not end by itself. It sets these events."""

    async def hang(_: RolloutRequest) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return hang


@pytest.mark.parametrize("row", [ROW, {**ROW, "answer": "other"}, {**ROW, "is_unscorable": True}])
async def test_a_remote_service_gives_the_same_samples_as_the_local_function(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    async with local_and_remote(tmp_path) as (local, remote, _, record):
        expected = await local(row)
        record.turns.clear()
        sample = await remote(row)
    assert expected is not None
    assert sample is not None
    assert_same(expected, sample)
    assert_matches_engine(sample, record)


async def test_rewards_and_states_of_turns_reach_the_run_through_a_service(tmp_path: Path) -> None:
    async with local_and_remote(tmp_path) as (local, _, setup, _):

        async def credited(request: RolloutRequest) -> RolloutSample:
            sample = await local(request.row)
            assert isinstance(sample, RolloutSample)
            return sample.with_turns(rewards=[0.25, -1.5], states=["door", "door"])

        async with serve_rollouts(FunctionService(setup.tokenizer.identity, credited)) as url:
            remote = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url}))
            sample = await remote(ROW)
    assert isinstance(sample, RolloutSample)
    assert sample.turn_rewards is not None
    assert sample.turn_rewards.tolist() == [0.25, -1.5]
    assert sample.turn_states is not None
    assert len(set(sample.turn_states.tolist())) == 1


async def test_a_turn_without_a_reward_among_others_has_0(tmp_path: Path) -> None:
    def some_reward(reply: dict[str, Any]) -> None:
        reply["turns"][1]["reward"] = 2.0

    async with local_and_remote(tmp_path) as (local, _, setup, _), altered_service(setup, local, some_reward) as remote:
        sample = await remote(ROW)
    assert isinstance(sample, RolloutSample)
    assert sample.turn_rewards is not None
    assert sample.turn_rewards.tolist() == [0.0, 2.0]
    assert sample.turn_states is None


async def test_a_sample_dropped_by_the_service_is_dropped_by_the_client(tmp_path: Path) -> None:
    async def nothing(_: RolloutRequest) -> None:
        return None

    async with local_and_remote(tmp_path, play=nothing) as (_, remote, _, _):
        assert await remote(ROW) is None


async def test_errors_keep_their_class_over_http(tmp_path: Path) -> None:
    async def fail(request: RolloutRequest) -> None:
        raise TransientError("sandbox away") if request.row["raises"] == "transient" else EpisodeError("sandbox broke")

    async with local_and_remote(tmp_path, play=fail) as (_, remote, _, _):
        with pytest.raises(TransientError, match="503: sandbox away"):
            await remote({"raises": "transient"})
        with pytest.raises(EpisodeError, match="422: sandbox broke"):
            await remote({"raises": "episode"})


async def test_a_different_tokenizer_stops_the_run(tmp_path: Path) -> None:
    async with local_and_remote(tmp_path, tokenizer_id="of-another-model") as (_, remote, _, record):
        with pytest.raises(RunError, match=r"uses tokenizer .* this run of-another-model"):
            await remote(ROW)
        assert record.turns == []


@asynccontextmanager
async def altered_service(
    setup: RolloutSetup, local: RolloutFn, alter: Callable[[dict[str, Any]], None]
) -> AsyncIterator[RolloutFn]:
    """A service that alters a correct reply before sending it."""

    class AlteredService:
        tokenizer_id = setup.tokenizer.identity

        async def play(self, request: RolloutRequest) -> RolloutReply | None:
            sample = await local(request.row)
            assert sample is not None
            found = msgspec.to_builtins(reply_of(sample, tokenizer_id=self.tokenizer_id))
            alter(found)
            return msgspec.convert(found, RolloutReply)

    async with serve_rollouts(AlteredService()) as url:
        yield service_client.make_rollout(dataclasses.replace(setup, settings={"url": url, "assembler": "linear"}))


def retokenised(reply: dict[str, Any]) -> None:
    reply["turns"][1]["prompt_ids"][8] += 1


def short_of_logprobs(reply: dict[str, Any]) -> None:
    reply["turns"][0]["logprobs"].pop()


def from_old_weights(reply: dict[str, Any]) -> None:
    reply["turns"][1]["versions"][0] = 1


def another_temperature(reply: dict[str, Any]) -> None:
    reply["sampling"]["temperature"] = 0.5


def with_another_tokenizer(reply: dict[str, Any]) -> None:
    reply["tokenizer_id"] = "another"


def with_one_state(reply: dict[str, Any]) -> None:
    reply["turns"][0]["state"] = "door"


def with_a_huge_reward(reply: dict[str, Any]) -> None:
    reply["turns"][0]["reward"] = 1e9


def without_turns(reply: dict[str, Any]) -> None:
    reply["turns"] = []


@pytest.mark.parametrize(
    ("alter", "error", "message"),
    [
        (retokenised, EpisodeError, "its turns do not chain: .* at position 8"),
        (short_of_logprobs, EpisodeError, "turn 1 has 4 tokens, 3 logprobs and 4 versions"),
        (from_old_weights, EpisodeError, "turn 2 was sampled from publication 1, but the group was admitted at 3"),
        (another_temperature, EpisodeError, r"temperature 0\.5, the others with 1\.0"),
        (with_another_tokenizer, TokenizerMismatchError, "uses tokenizer another"),
        (with_one_state, EpisodeError, r"turn_states has shape \(1,\); the sample has 2 turns"),
        (with_a_huge_reward, EpisodeError, "turn_rewards has 1000000000.0 at position 0, which cannot be trained"),
        (without_turns, EpisodeError, "without a turn|nothing was assembled"),
    ],
)
async def test_an_invalid_trajectory_is_refused_with_the_reason(
    tmp_path: Path, alter: Callable[[dict[str, Any]], None], error: type[Exception], message: str
) -> None:
    async with local_and_remote(tmp_path) as (local, _, setup, _), altered_service(setup, local, alter) as remote:
        enter_episode(EpisodeContext(group_id=GroupId("t@0"), min_publication=3, until=time.monotonic() + 60))
        with pytest.raises(error, match=message):
            await remote(ROW)


async def test_a_reply_without_a_reason_is_truncated_if_its_last_turn_was_cut(tmp_path: Path) -> None:
    def cut(reply: dict[str, Any]) -> None:
        reply["finish_reason"] = None
        reply["turns"][-1]["finish_reason"] = "length"

    async with local_and_remote(tmp_path) as (local, _, setup, _), altered_service(setup, local, cut) as remote:
        sample = await remote(ROW)
    assert sample is not None
    assert sample.finish_reason is EndReason.MAX_TOKENS


async def test_cancelling_an_episode_cancels_it_in_the_service(tmp_path: Path) -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    hang = hanging(began, ended)
    async with local_and_remote(tmp_path, play=hang) as (_, remote, _, _):
        episode = asyncio.ensure_future(remote(ROW))
        await asyncio.wait_for(began.wait(), 30)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await asyncio.wait_for(ended.wait(), 30)


async def test_an_episode_ends_at_its_deadline_in_client_and_service(tmp_path: Path) -> None:
    ended = asyncio.Event()
    hang = hanging(asyncio.Event(), ended)

    async with local_and_remote(tmp_path, play=hang) as (_, remote, _, _):
        enter_episode(EpisodeContext(group_id=GroupId("t@0"), min_publication=0, until=time.monotonic() + 0.4))
        with pytest.raises(TransientError, match=r"did not respond within|504"):
            await remote(ROW)
        await asyncio.wait_for(ended.wait(), 30)


@pytest.mark.parametrize(("failures", "is_successful"), [(1, True), (2, False)])
async def test_a_lost_connection_is_retried_once_and_joins_the_same_episode(
    tmp_path: Path, failures: int, is_successful: bool
) -> None:
    played: list[str] = []
    seen: list[str] = []

    @web.middleware
    async def drop(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.append(request.method)
        if request.method == "POST" and len(seen) <= failures:
            await handler(request)
            assert request.transport is not None
            request.transport.close()
        response: web.StreamResponse = await handler(request)
        return response

    async with local_and_remote(tmp_path) as (local, _, setup, _):

        async def play(request: RolloutRequest) -> RolloutSample | None:
            played.append(request.request_id)
            return await local(request.row)

        app = rollout_app(FunctionService(setup.tokenizer.identity, play))
        app.middlewares.append(drop)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        remote = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url}))
        try:
            if is_successful:
                assert await remote(ROW) is not None
            else:
                with pytest.raises(TransientError):
                    await remote(ROW)
        finally:
            await runner.cleanup()
    assert len(played) == 1, "the episode is played once"
    assert seen.count("POST") == 2, "there is one retry"


async def test_an_episode_that_the_client_gives_up_is_cancelled_in_the_service(tmp_path: Path) -> None:
    ended = asyncio.Event()
    hang = hanging(asyncio.Event(), ended)

    @web.middleware
    async def drop(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "POST" and request.transport is not None:
            asyncio.get_running_loop().call_later(0.05, request.transport.close)
        response: web.StreamResponse = await handler(request)
        return response

    async with agent_setup(tmp_path, reply, settings=AGENT) as (setup, _):
        app = rollout_app(FunctionService(setup.tokenizer.identity, hang))
        app.middlewares.append(drop)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            remote = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url}))
            with pytest.raises(TransientError, match="disconnected"):
                await remote(ROW)
            await asyncio.wait_for(ended.wait(), 5)
        finally:
            await runner.cleanup()


async def test_a_service_off_loopback_requires_a_token_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, reply) as (setup, _):
        service = FunctionService(setup.tokenizer.identity, lambda _: asyncio.sleep(0, None))
        with pytest.raises(ValueError, match="a token is required"):
            async with serve_rollouts(service, host="0.0.0.0"):
                pass
        async with serve_rollouts(service, token="s3cret") as url:
            good = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url, "token": "s3cret"}))
            assert await good(ROW) is None
            bad = service_client.make_rollout(dataclasses.replace(setup, settings={"url": url}))
            with pytest.raises(RunError, match="401"):
                await bad(ROW)
