"""Our server and our client over a real socket."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.ports import Environment
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
from rollbook.envs.pools.environment_pool import open_environment_pool
from rollbook.envs.server.app import EnvironmentInfo, build_app
from rollbook.envs.server.run import serve_environments
from rollbook.envs.server.sessions import session_capacity
from rollbook.telemetry.events import EventLog, read_json_lines
from tests.parts.envs.environments import GAME, Breaker, CannotBeMade, Notebook, Sleeper, Waiter, served, until


async def now(url: str, options: ClientOptions | None = None) -> EnvSession:
    """Connect once, without patience. The connections are closed at the end of the test."""
    options = options or ClientOptions()
    _OPEN.append(new_http(options))
    return await connect(_OPEN[-1], url, options, deadline=Deadline(10, "test"))


_OPEN: list[aiohttp.ClientSession] = []


@pytest.fixture(autouse=True)
async def _closed_connections() -> AsyncIterator[None]:
    yield
    while _OPEN:
        await _OPEN.pop().close()


async def test_an_episode_is_played_and_the_environment_is_given_back() -> None:
    async with served("number_guessing", size=1) as server:
        async with open_session(server.url) as environment:
            first = await environment.reset(GAME, episode_id="mine")
            low = await environment.step("3")
            last = await environment.step("I say 5!")
            state = await environment.state()
            assert server.pool.health().busy == 1
        assert server.pool.health().busy == 0
    assert first.text == "guess a number from 0 to 15"
    assert (low.text, low.done) == ("higher", False)
    assert (last.text, last.done, last.solved, last.reward > 0.8) == ("correct", True, True, True)
    assert last.facts == {"secret": 5, "guesses": [3, 5]}
    assert state == {"episode_id": "mine", "step_count": 2, "done": True}


async def test_facts_stay_on_the_server_where_it_is_told_so() -> None:
    async with served("number_guessing", send_facts=False) as server, open_session(server.url) as environment:
        assert (await environment.reset(GAME)).facts == {}


async def test_a_closed_session_leaves_room_for_the_next_at_once() -> None:
    async with served("number_guessing", size=1, connect_wait_s=0) as server:
        for _ in range(30):
            environment = await now(server.url)
            await environment.reset(GAME)
            await environment.close()


async def test_a_full_server_refuses_with_503_and_says_when_to_try_again() -> None:
    async with served("number_guessing", size=2, connect_wait_s=0.01) as server:
        first, second = await now(server.url), await now(server.url)
        with pytest.raises(ServerFullError) as refusal:
            await now(server.url)
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


async def test_a_client_with_patience_gets_the_place_that_comes_free() -> None:
    async with served("number_guessing", size=1, connect_wait_s=0.01) as server:
        holder = await now(server.url)
        asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(holder.close()))
        async with open_session(server.url) as environment:
            assert (await environment.reset(GAME)).text


class _Boastful:
    """A pool with a place more than it has environments: one of them is being made anew, say."""

    capacity = 2

    def __init__(self, environments: EnvironmentPool) -> None:
        self._environments = environments

    async def acquire(self, deadline: Deadline) -> Environment:
        return await self._environments.acquire(deadline)

    def health(self) -> PoolHealth:
        return self._environments.health()


async def test_a_client_that_is_already_in_hears_capacity_reached_when_no_environment_comes() -> None:
    async with open_environment_pool(EnvConfig(), size=1, log=EventLog("test")) as environments:
        app = build_app(_Boastful(environments), EnvServerConfig(acquire_s=0.05), info=EnvironmentInfo(name="boastful"))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            first = await now(url)
            with pytest.raises(ServerFullError, match="all 1 environments are in use") as refusal:
                await now(url)
            assert refusal.value.capacity == 2
            await first.close()
            await (await now(url)).close()
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("task", "action", "told"),
    [
        ({"break": "reset"}, None, "OSError: no disk"),
        ({}, "boom", "KeyError: 'boom'"),
        ({}, "nan", "it must be finite"),
        ({}, "surrogate", "cannot be sent as JSON"),
        ({}, "circle", "cannot be sent as JSON"),
    ],
)
async def test_what_an_environment_raises_is_an_episode_error_and_the_session_goes_on(
    task: dict[str, str], action: str | None, told: str
) -> None:
    async with served(Breaker) as server, open_session(server.url) as environment:
        if action is not None:
            await environment.reset(task)
        with pytest.raises(EpisodeError, match=told):
            await (environment.reset(task) if action is None else environment.step(action))
        assert not environment.is_lost
        assert (await environment.reset({})).text == "whole"
        assert (await environment.step("fact")).facts["when"] == "(1+2j)"


async def test_an_environment_that_cannot_be_made_is_told_and_its_place_is_free_again() -> None:
    CannotBeMade.made = 0
    async with served(CannotBeMade, size=1) as server:
        for _ in range(2):
            with pytest.raises(SessionLostError, match=r"factory is closed.*FACTORY_ERROR"):
                await now(server.url)
        await until(lambda: server.pool.health().busy == 0)


async def test_an_environment_that_breaks_while_closing_costs_nobody_a_place(tmp_path: Path) -> None:
    log = EventLog("env-server", tmp_path / "log.jsonl", echo=(tmp_path / "echo").open("w"))
    env = EnvConfig(name=f"{Breaker.__module__}:Breaker")
    async with serve_environments(env, EnvServerConfig(connect_wait_s=0), size=1, log=log) as server:
        for _ in range(3):
            environment = await now(server.url)
            await environment.reset({"break": "close"})
            await environment.close()
        assert server.pool.health().busy == 0
    told = [event["event"] for event in read_json_lines(tmp_path / "log.jsonl")]
    assert told.count("envs.environment_not_closed") == 3


async def test_a_step_before_a_reset_and_after_the_end_is_refused() -> None:
    async with served("number_guessing") as server, open_session(server.url) as environment:
        with pytest.raises(EpisodeError, match="step before reset"):
            await environment.step("5")
        await environment.reset(GAME)
        await environment.step("5")
        with pytest.raises(EpisodeError, match="step after the end"):
            await environment.step("5")


async def test_the_server_ends_an_episode_at_its_step_limit() -> None:
    async with served(Notebook, max_steps=2) as server, open_session(server.url) as environment:
        await environment.reset({"owner": "a"})
        assert not (await environment.step("one")).done
        last = await environment.step("two")
        assert (last.done, last.reward, last.facts) == (True, 0.0, {"cut_after_steps": 2})


async def test_sessions_do_not_see_each_other() -> None:
    async with served(Notebook) as server:
        environments = [await now(server.url) for _ in range(8)]
        await asyncio.gather(*(environment.reset({"owner": f"w{i}"}) for i, environment in enumerate(environments)))
        for turn in range(6):
            await asyncio.gather(*(environment.step(f"{i}.{turn}") for i, environment in enumerate(environments)))
        ends = await asyncio.gather(*(environment.step("end") for environment in environments))
        for i, end in enumerate(ends):
            assert end.text == "|".join([f"w{i}", *(f"{i}.{turn}" for turn in range(6)), "end"])
        await asyncio.gather(*(environment.close() for environment in environments))


async def test_a_blocking_environment_never_blocks_the_server() -> None:
    Sleeper.let_go.clear()
    async with served(Sleeper, close_s=0.2) as server:
        stuck, other = await now(server.url), await now(server.url)
        await stuck.reset({})
        await other.reset({})
        hanging = asyncio.ensure_future(stuck.step("stuck"))
        await asyncio.sleep(0.05)
        assert (await other.step("0")).text == "awake"
        assert (await other.step("0")).facts["thread"] != threading.main_thread().name
        assert not hanging.done()
        Sleeper.let_go.set()
        assert (await hanging).text == "awake"
        await stuck.close()
        await other.close()


async def test_a_step_that_takes_too_long_ends_the_session_and_frees_its_place() -> None:
    async with served(Waiter, size=1, step_s=0.05) as server:
        environment = await now(server.url)
        await environment.reset({})
        with pytest.raises(SessionLostError, match=r"longer than 0.05 s"):
            await environment.step("30")
        await until(lambda: server.pool.health().busy == 0)
        with pytest.raises(SessionLostError):
            await environment.step("0")
        async with open_session(server.url) as fresh:
            assert (await fresh.reset({})).text == "waiting"


async def test_a_session_that_nobody_uses_is_ended_for_good() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=1, idle_s=0.2) as server:
        environment = await now(server.url)
        await environment.reset({})
        assert (await environment.step("0.5")).text == "done waiting"  # at work is not idle
        await until(lambda: server.pool.health().busy == 0)
        assert Waiter.events == ["began", "closed"]
        with pytest.raises(SessionLostError, match=r"idle for 0.2 s|closed"):
            await environment.step("0")
        await environment.close()


async def test_a_client_that_leaves_in_the_middle_of_a_step_gives_its_environment_back_at_once() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=1) as server:
        environment = await now(server.url)
        await environment.reset({})
        stepping = asyncio.ensure_future(environment.step("600"))
        await until(lambda: "began" in Waiter.events)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        assert environment.is_lost
        await environment.close()
        await until(lambda: server.pool.health().busy == 0)
        assert Waiter.events == ["began", "cancelled", "closed"]


async def test_an_answer_that_comes_too_late_is_never_taken_for_the_next_one() -> None:
    async with served(Waiter) as server:
        environment = await now(server.url, ClientOptions(request_s=0.1))
        await environment.reset({})
        with pytest.raises(SessionLostError, match="no reply within"):
            await environment.step("0.3")
        with pytest.raises(SessionLostError, match="got no reply"):
            await environment.step("0")
        await environment.close()


async def test_questions_touch_no_environment_and_a_step_needs_a_session() -> None:
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
            for told in ("correct", "step after the end"):
                await socket.send_json({"type": "mcp", "data": {"id": 2, "method": "tools/call", "params": call}})
                answer = (await socket.receive_json())["data"]["result"]
                assert told in answer["content"][0]["text"]
            for method, code in (("tools/fly", -32601), (None, -32600)):
                await socket.send_json({"type": "mcp", "data": {"id": 3, "method": method}})
                assert (await socket.receive_json())["data"]["error"]["code"] == code


async def test_garbage_on_the_socket_is_answered_and_the_session_lives() -> None:
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


async def test_a_message_beyond_the_limit_ends_the_connection_and_nothing_else() -> None:
    async with served(Notebook, size=2, max_message_bytes=2048) as server:
        async with open_session(server.url) as environment:
            await environment.reset({})
            with pytest.raises(EpisodeError):
                await environment.step("x" * 4096)
        await until(lambda: server.pool.health().busy == 0)
        async with open_session(server.url) as environment:
            assert (await environment.reset({})).text == "nobody"


async def test_a_token_is_asked_for_and_other_sites_are_turned_away() -> None:
    async with served("number_guessing", token="open sesame") as server:
        with pytest.raises(RunError, match="token"):
            await now(server.url)
        async with open_session(server.url, ClientOptions(token="open sesame")) as environment:
            assert (await environment.reset(GAME)).text
        async with aiohttp.ClientSession(server.url) as http:
            async with http.get("/health") as reply:
                assert reply.status == 200
            async with http.get("/schema") as reply:
                assert reply.status == 401
            async with http.get("/ws?token=open sesame", headers={"Origin": "http://evil.example"}) as reply:
                assert reply.status == 403


async def test_off_the_loopback_a_token_is_a_must() -> None:
    with pytest.raises(RunError, match="set a token"):
        async with serve_environments(EnvConfig(), host="0.0.0.0"):
            pass


async def test_no_server_and_no_such_server_are_told_apart() -> None:
    with pytest.raises(TransientError, match="is the server running"):
        await now("http://127.0.0.1:9")
    async with served("number_guessing") as server:
        with pytest.raises(RunError, match="OpenEnv server"):
            await now(f"{server.url}/elsewhere")


async def test_the_playground_is_for_a_single_environment() -> None:
    with pytest.raises(RunError, match=r"one environment.* 8 sessions"):
        async with served("number_guessing", size=8, playground=True):
            pass
    async with served("number_guessing", size=1, playground=True) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url) as reply:
            page = await reply.text()
        assert "<h1>number_guessing</h1>" in page
        assert "http://" not in page.replace("http://127.0.0.1", "")


async def test_a_server_that_stops_tells_its_clients_and_gives_every_environment_back() -> None:
    Waiter.events.clear()
    async with served(Waiter, size=4) as server:
        environments = [await now(server.url) for _ in range(4)]
        for environment in environments:
            await environment.reset({})
    assert Waiter.events == ["closed"] * 4
    with pytest.raises(SessionLostError):
        await environments[0].step("0")


def test_more_sessions_than_environments_is_an_error_of_the_operator() -> None:
    assert [session_capacity(8, None), session_capacity(8, 4), session_capacity(None, 3)] == [8, 4, 3]
    with pytest.raises(RunError, match=r"max_sessions is 9.* 8 environments"):
        session_capacity(8, 9)
