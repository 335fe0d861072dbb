"""Our server and our client over a real socket."""

import asyncio
import io
import re
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.ports import Environment
from rollbook.envs.catalog import open_environment_pool
from rollbook.envs.client.session import (
    ClientOptions,
    EnvSession,
    ServerFullError,
    SessionLostError,
    connect,
    new_http,
    open_session,
)
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.environment import EnvironmentPool, PoolHealth
from rollbook.envs.server.app import EnvironmentInfo, build_app
from rollbook.envs.server.run import serve_environments
from rollbook.envs.server.sessions import session_capacity
from rollbook.telemetry.events import EventLog, read_json_lines
from tests.parts.envs.environments import GAME, Breaker, CannotBeCreated, Notebook, Sleeper, Waiter, served, until


async def connect_once(url: str, options: ClientOptions | None = None) -> EnvSession:
    """Connect without retries. The connections are closed at the end of the test."""
    options = options or ClientOptions()
    _OPEN.append(new_http(options))
    return await connect(_OPEN[-1], url, options, deadline=Deadline(10, "test"))


_OPEN: list[aiohttp.ClientSession] = []


@pytest.fixture(autouse=True)
async def _closed_connections() -> AsyncIterator[None]:
    yield
    while _OPEN:
        await _OPEN.pop().close()


async def test_an_episode_is_played_and_the_environment_is_returned() -> None:
    async with served("number_guessing", size=1) as server:
        async with open_session(server.url) as env:
            first = await env.reset(GAME, episode_id="mine")
            low = await env.step("3")
            last = await env.step("I say 5!")
            state = await env.state()
            assert server.pool.health().busy == 1
        assert server.pool.health().busy == 0
    assert first.text == "guess a number from 0 to 15"
    assert (low.text, low.done) == ("higher", False)
    assert (last.text, last.done, last.solved, last.reward > 0.8) == ("correct", True, True, True)
    assert last.facts == {"secret": 5, "guesses": [3, 5]}
    assert state == {"episode_id": "mine", "step_count": 2, "done": True}


async def test_facts_are_not_sent_if_the_setting_is_off() -> None:
    async with served("number_guessing", send_facts=False) as server, open_session(server.url) as env:
        assert (await env.reset(GAME)).facts == {}


async def test_a_closed_session_frees_its_slot_at_once() -> None:
    async with served("number_guessing", size=1, connect_wait_s=0) as server:
        for _ in range(30):
            env = await connect_once(server.url)
            await env.reset(GAME)
            await env.close()


async def test_a_full_server_refuses_with_503_and_retry_after() -> None:
    async with served("number_guessing", size=2, connect_wait_s=0.01) as server:
        first, second = await connect_once(server.url), await connect_once(server.url)
        with pytest.raises(ServerFullError) as refusal:
            await connect_once(server.url)
        assert refusal.value.retry_after_s == 1
        async with aiohttp.ClientSession() as http, http.post(f"{server.url}/reset", json={"task": GAME}) as reply:
            assert reply.status == 503
            assert (await reply.json())["data"] | {"message": ""} == {
                "message": "",
                "code": "CAPACITY_REACHED",
                "active_sessions": 2,
                "max_sessions": 2,
            }
        await first.close()
        await second.close()


async def test_a_waiting_client_gets_the_next_free_slot() -> None:
    async with served("number_guessing", size=1, connect_wait_s=0.01) as server:
        holder = await connect_once(server.url)
        asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(holder.close()))
        async with open_session(server.url) as env:
            assert (await env.reset(GAME)).text


class _OvercommittedPool:
    """A pool that reports one slot more than it has environments, as during the replacement of one."""

    capacity = 2

    def __init__(self, envs: EnvironmentPool) -> None:
        self._pool = envs

    async def acquire(self, deadline: Deadline) -> Environment:
        return await self._pool.acquire(deadline)

    def health(self) -> PoolHealth:
        return self._pool.health()


async def test_a_connected_client_gets_capacity_reached_if_no_environment_becomes_free() -> None:
    async with open_environment_pool(EnvConfig(), size=1, log=EventLog("test")) as envs:
        app = build_app(
            _OvercommittedPool(envs), EnvServerConfig(acquire_s=0.05), info=EnvironmentInfo(name="overcommitted")
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            first = await connect_once(url)
            with pytest.raises(ServerFullError, match="all 1 environments are in use") as refusal:
                await connect_once(url)
            assert refusal.value.capacity == 2
            await first.close()
            await (await connect_once(url)).close()
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("task", "action", "message"),
    [
        ({"break": "reset"}, None, "OSError: no disk"),
        ({}, "boom", "KeyError: 'boom'"),
        ({}, "nan", "it must be finite"),
        ({}, "circle", "cannot be sent as JSON"),
    ],
)
async def test_an_exception_of_an_environment_is_an_episode_error_and_the_session_continues(
    task: dict[str, str], action: str | None, message: str
) -> None:
    async with served(Breaker) as server, open_session(server.url) as env:
        if action is not None:
            await env.reset(task)
        with pytest.raises(EpisodeError, match=message):
            await (env.reset(task) if action is None else env.step(action))
        assert not env.is_lost
        assert (await env.reset({})).text == "whole"
        assert (await env.step("fact")).facts["when"] == "(1+2j)"
        assert (await env.step("surrogate")).text == "\\ud800"


async def test_an_environment_that_cannot_be_created_is_reported_and_its_slot_is_freed() -> None:
    CannotBeCreated.created = 0
    async with served(CannotBeCreated, size=1) as server:
        for _ in range(2):
            with pytest.raises(SessionLostError, match=r"factory is closed.*FACTORY_ERROR"):
                await connect_once(server.url)
        await until(lambda: server.pool.health().busy == 0)


async def test_an_exception_in_close_does_not_leak_a_slot(tmp_path: Path) -> None:
    config = EnvConfig(name=f"{Breaker.__module__}:Breaker")
    with closing(EventLog("env-server", tmp_path / "log.jsonl", echo=io.StringIO())) as log:
        async with serve_environments(config, EnvServerConfig(connect_wait_s=0), size=1, log=log) as server:
            for _ in range(3):
                env = await connect_once(server.url)
                await env.reset({"break": "close"})
                await env.close()
            assert server.pool.health().busy == 0
    events = [event["event"] for event in read_json_lines(tmp_path / "log.jsonl")]
    assert events.count("envs.environment_not_closed") == 3


async def test_a_step_before_a_reset_and_after_the_end_is_refused() -> None:
    async with served("number_guessing") as server, open_session(server.url) as env:
        with pytest.raises(EpisodeError, match="step before reset"):
            await env.step("5")
        await env.reset(GAME)
        await env.step("5")
        with pytest.raises(EpisodeError, match="step after the end"):
            await env.step("5")


async def test_the_server_ends_an_episode_at_its_step_limit() -> None:
    async with served(Notebook, max_steps=2) as server, open_session(server.url) as env:
        await env.reset({"owner": "a"})
        assert not (await env.step("one")).done
        last = await env.step("two")
        assert (last.done, last.reward, last.facts) == (True, 0.0, {"cut_after_steps": 2})


async def test_sessions_do_not_see_each_other() -> None:
    async with served(Notebook) as server:
        envs = [await connect_once(server.url) for _ in range(8)]
        await asyncio.gather(*(env.reset({"owner": f"w{i}"}) for i, env in enumerate(envs)))
        for turn in range(6):
            await asyncio.gather(*(env.step(f"{i}.{turn}") for i, env in enumerate(envs)))
        ends = await asyncio.gather(*(env.step("end") for env in envs))
        for i, end in enumerate(ends):
            assert end.text == "|".join([f"w{i}", *(f"{i}.{turn}" for turn in range(6)), "end"])
        await asyncio.gather(*(env.close() for env in envs))


async def test_a_blocking_environment_never_blocks_the_server() -> None:
    Sleeper.unblock.clear()
    async with served(Sleeper, close_s=0.2) as server:
        stuck, other = await connect_once(server.url), await connect_once(server.url)
        await stuck.reset({})
        await other.reset({})
        hanging = asyncio.ensure_future(stuck.step("stuck"))
        await asyncio.sleep(0.05)
        assert (await other.step("0")).text == "awake"
        assert (await other.step("0")).facts["thread"] != threading.main_thread().name
        assert not hanging.done()
        Sleeper.unblock.set()
        assert (await hanging).text == "awake"
        await stuck.close()
        await other.close()


async def test_a_step_over_its_time_limit_closes_the_session_and_frees_its_slot() -> None:
    async with served(Waiter, size=1, step_s=0.05) as server:
        env = await connect_once(server.url)
        await env.reset({})
        with pytest.raises(SessionLostError, match=r"longer than 0.05 s"):
            await env.step("30")
        await until(lambda: server.pool.health().busy == 0)
        with pytest.raises(SessionLostError):
            await env.step("0")
        async with open_session(server.url) as fresh:
            assert (await fresh.reset({})).text == "waiting"


@pytest.mark.parametrize("route", ["message", "tool over HTTP", "tool over the socket"])
async def test_a_step_over_its_time_limit_closes_a_session_of_tools(route: str) -> None:
    async with served(Waiter, size=1, step_s=0.05) as server, aiohttp.ClientSession(server.url) as http:
        async with http.post("/mcp", json={"id": 1, "method": "openenv/session/create"}) as reply:
            session_id = (await reply.json())["result"]["session_id"]
        params = {"session_id": session_id, "name": "act", "arguments": {"action": "30"}}
        call = {"id": 2, "method": "tools/call", "params": params}
        async with http.ws_connect("/ws", params={"session_id": session_id}) as socket:
            await socket.send_json({"type": "reset", "data": {"task": {}}})
            await socket.receive_json()
            if route == "tool over HTTP":
                async with http.post("/mcp", json=call) as reply:
                    answer = await reply.text()
            else:
                message = {"type": "mcp", "data": call}
                await socket.send_json(
                    message if route == "tool over the socket" else {"type": "step", "data": {"action": "30"}}
                )
                answer = await socket.receive_str()
        assert "took longer than 0.05 s; this session is closed" in answer
        await until(lambda: server.pool.health().busy == 0, within_s=5)
        async with http.post("/mcp", json=call) as reply:
            assert "there is no session" in (await reply.json())["error"]["message"]


async def test_an_idle_session_is_closed() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=1, idle_s=1.0) as server:
        env = await connect_once(server.url)
        await env.reset({})
        assert (await env.step("1.5")).text == "done waiting"  # a working session is not idle
        await until(lambda: server.pool.health().busy == 0)
        assert Waiter.events == ["began", "closed"]
        with pytest.raises(SessionLostError, match=r"idle for 1 s|closed"):
            await env.step("0")
        await env.close()


async def test_a_client_that_leaves_during_a_step_returns_its_environment_at_once() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=1) as server:
        env = await connect_once(server.url)
        await env.reset({})
        stepping = asyncio.ensure_future(env.step("600"))
        await until(lambda: "began" in Waiter.events)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        assert env.is_lost
        await env.close()
        await until(lambda: server.pool.health().busy == 0)
        assert Waiter.events == ["began", "cancelled", "closed"]


async def test_a_late_reply_is_never_taken_for_the_next_one() -> None:
    async with served(Waiter) as server:
        env = await connect_once(server.url, ClientOptions(request_s=1.0))
        await env.reset({})
        with pytest.raises(SessionLostError, match="no reply within"):
            await env.step("30")
        with pytest.raises(SessionLostError, match="got no reply"):
            await env.step("0")
        await env.close()


async def test_status_requests_use_no_environment_and_a_step_needs_a_session() -> None:
    async with served("number_guessing", size=1) as server, aiohttp.ClientSession(server.url) as http:
        for path in ("/health", "/metadata", "/schema", "/state"):
            async with http.get(path) as reply:
                assert reply.status == 200
                body = await reply.json()
            assert server.pool.health().busy == 0
            match path:
                case "/health":
                    assert (body["status"], body["capacity"], body["active"]) == ("healthy", 1, 0)
                case "/metadata":
                    assert (body["name"], body["max_sessions"]) == ("number_guessing", 1)
                case "/schema":
                    assert set(body) == {"action", "observation", "state"}
                case _:
                    assert body["step_count"] == 0
        async with http.post("/reset", json={"task": GAME}) as reply:
            assert (await reply.json())["observation"]["text"] == "guess a number from 0 to 15"
        async with http.post("/reset", json=[1]) as reply:
            assert reply.status == 422
        async with http.post("/step", json={"action": {"action": "5"}}) as reply:
            assert reply.status == 409
        assert server.pool.health().busy == 0


async def test_tools_are_listed_and_called_in_a_session() -> None:
    async with served("number_guessing") as server, aiohttp.ClientSession(server.url) as http:
        async with http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}) as reply:
            assert [tool["name"] for tool in (await reply.json())["result"]["tools"]] == ["act"]
        async with http.post("/mcp", json={"id": 1, "method": "tools/call", "params": {"name": "act"}}) as reply:
            assert "session" in (await reply.json())["error"]["message"]
        async with http.ws_connect("/ws") as socket:
            await socket.send_json({"type": "reset", "data": {"task": GAME}})
            await socket.receive_json()
            call = {"name": "act", "arguments": {"action": "5"}}
            for text in ("correct", "step after the end"):
                await socket.send_json({"type": "mcp", "data": {"id": 2, "method": "tools/call", "params": call}})
                answer = (await socket.receive_json())["data"]["result"]
                assert text in answer["content"][0]["text"]
            for method, code in (("tools/fly", -32601), (None, -32600)):
                await socket.send_json({"type": "mcp", "data": {"id": 3, "method": method}})
                assert (await socket.receive_json())["data"]["error"]["code"] == code


async def test_invalid_messages_get_an_error_and_the_session_continues() -> None:
    async with (
        served("number_guessing") as server,
        aiohttp.ClientSession(server.url) as http,
        http.ws_connect("/ws") as socket,
    ):
        for text, code in (
            ("nonsense", "INVALID_JSON"),
            ('{"type":"step","data":{"a":' + "[" * 100_000, "INVALID_JSON"),
            ('{"type":"sing"}', "UNKNOWN_TYPE"),
            ("[]", "VALIDATION_ERROR"),
        ):
            await socket.send_str(text)
            assert (await socket.receive_json())["data"]["code"] == code
        await socket.send_json({"type": "state"})
        assert (await socket.receive_json())["type"] == "state"


async def test_a_message_over_the_size_limit_ends_only_its_connection() -> None:
    async with served(Notebook, size=2, max_message_bytes=2048) as server:
        async with open_session(server.url) as env:
            await env.reset({})
            with pytest.raises(EpisodeError):
                await env.step("x" * 4096)
        await until(lambda: server.pool.health().busy == 0)
        async with open_session(server.url) as env:
            assert (await env.reset({})).text == "nobody"


async def test_the_token_is_required_and_other_origins_are_refused() -> None:
    async with served("number_guessing", token="open sesame") as server:
        with pytest.raises(RunError, match="token"):
            await connect_once(server.url)
        async with open_session(server.url, ClientOptions(token="open sesame")) as env:
            assert (await env.reset(GAME)).text
        async with aiohttp.ClientSession(server.url) as http:
            async with http.get("/health") as reply:
                assert reply.status == 200
            async with http.get("/schema") as reply:
                assert reply.status == 401
            async with http.get("/ws?token=open sesame", headers={"Origin": "http://evil.example"}) as reply:
                assert reply.status == 403


async def test_a_server_that_other_machines_can_reach_needs_a_token() -> None:
    with pytest.raises(RunError, match="set an access token"):
        async with serve_environments(EnvConfig(), host="0.0.0.0"):
            pass


async def test_a_missing_server_and_a_wrong_server_raise_different_errors() -> None:
    with pytest.raises(TransientError, match="is the server running"):
        await connect_once("http://127.0.0.1:9")
    async with served("number_guessing") as server:
        with pytest.raises(RunError, match="OpenEnv server"):
            await connect_once(f"{server.url}/elsewhere")


async def test_the_playground_needs_a_pool_of_one() -> None:
    with pytest.raises(RunError, match=r"one env.* 8 sessions"):
        async with served("number_guessing", size=8, playground=True):
            pass
    async with served("number_guessing", size=1, playground=True) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url) as reply:
            assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
            page = await reply.text()
        for address in re.findall(r'(?:src|href)="([^"]+)"', page):
            async with http.get(server.url + address) as reply:
                assert (reply.status, len(await reply.read()) > 100) == (200, True), address


@pytest.mark.parametrize("name", ["arithmetic", "maths", "number_guessing", "terminal"])
async def test_every_example_task_of_the_playground_can_be_played(name: str) -> None:
    async with served(name, size=1, playground=True) as server, aiohttp.ClientSession() as http:
        async with http.get(f"{server.url}/web/tasks") as reply:
            offer = await reply.json()
        assert (offer["name"], offer["num_tasks"]) == (name, len(offer["tasks"]))
        ids = [task["id"] for task in offer["tasks"]]
        assert len(ids) == len(set(ids)) > 0
        assert all(task["description"] for task in offer["tasks"])
        for task in offer["tasks"]:
            env = await connect_once(server.url)
            assert (await env.reset(task["task"])).text
            await env.close()


async def test_the_playground_offers_the_tasks_it_is_given_instead_of_the_examples() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "mine", "tier": 3, "secret": 1, "low": 0, "high": 2},
        {"secret": 0, "low": 0, "high": 2},
    ]
    env, config = EnvConfig(name="number_guessing"), EnvServerConfig(playground=True)
    async with (
        serve_environments(env, config, size=1, tasks=rows) as server,
        aiohttp.ClientSession() as http,
        http.get(f"{server.url}/web/tasks") as reply,
    ):
        tasks = (await reply.json())["tasks"]
    assert [(task["id"], task["tier"], task["task"]) for task in tasks] == [
        ("mine", "3", rows[0]),
        ("", None, rows[1]),
    ]


async def test_a_stopping_server_notifies_its_clients_and_returns_every_environment() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=4) as server:
        envs = [await connect_once(server.url) for _ in range(4)]
        for env in envs:
            await env.reset({})
    assert Waiter.events == ["closed"] * 4
    with pytest.raises(SessionLostError):
        await envs[0].step("0")


def test_more_sessions_than_environments_is_a_configuration_error() -> None:
    assert [session_capacity(8, None), session_capacity(8, 4), session_capacity(None, 3)] == [8, 4, 3]
    with pytest.raises(RunError, match=r"max_sessions is 9.* 8 environments"):
        session_capacity(8, 9)
