"""Tools of real MCP servers in the tool loop: a command over standard input and output, and streamable HTTP."""

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.episodes.tools import make_rollout
from tests.parts.rollout.agents import agent_setup, assert_matches_engine, in_order
from tests.parts.rollout.mcp_server import server

SCRIPT = Path(__file__).parents[1] / "parts" / "rollout" / "mcp_server.py"
STDIO = {"command": [sys.executable, str(SCRIPT)]}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


async def play(tmp_path: Path, replies: Sequence[str], **settings: Any) -> RolloutSample:
    async with agent_setup(tmp_path, in_order(*replies), settings=settings) as (setup, record):
        sample = await make_rollout(setup)({"question": "Count."})
    assert sample is not None
    assert_matches_engine(sample, record)
    return sample


def results(sample: RolloutSample) -> list[str]:
    return [entry["result"] for entry in sample.facts["tool_calls"]]


@asynccontextmanager
async def serving(authorization: bytes | None = None, *, port: int = 0) -> AsyncIterator[str]:
    """The server over streamable HTTP. With `authorization`, it refuses requests without this header."""
    served = server.streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        is_refused = scope["type"] == "http" and authorization not in (
            None,
            dict(scope["headers"]).get(b"authorization"),
        )
        await (PlainTextResponse("no", 401) if is_refused else served)(scope, receive, send)

    sock = listening_socket("127.0.0.1", port)
    web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    task = asyncio.create_task(web.serve(sockets=[sock]))
    try:
        yield f"{url_of(sock)}/mcp"
    finally:
        web.should_exit = True
        await task


REPLIES = [
    call("add", number=3),
    call("add", number=4),
    call("divide", left=1, right=0),
    call("add", number="x"),
    call("nothing"),
    "Seven.<|im_end|>",
]


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_policy_calls_tools_of_a_server_and_reads_their_errors(tmp_path: Path, transport: str) -> None:
    if transport == "stdio":
        sample = await play(tmp_path, REPLIES, mcp={"numbers": STDIO})
    else:
        async with serving() as url:
            sample = await play(tmp_path, REPLIES, mcp={"numbers": {"url": url}})
    first, second, division, wrong, unknown = results(sample)
    assert int(second) - int(first) == 4
    assert "Error executing tool divide" in division
    assert "number" in wrong
    assert "there is no tool 'nothing'; the tools are add, divide, stop" in unknown


async def test_each_episode_has_a_server_of_its_own(tmp_path: Path) -> None:
    replies = [call("add", number=3), "Three.<|im_end|>"] * 2
    async with agent_setup(tmp_path, in_order(*replies), settings={"mcp": {"numbers": STDIO}}) as (setup, _):
        rollout = make_rollout(setup)
        played = [await rollout({"question": "Count."}) for _ in range(2)]
    assert [results(sample) for sample in played if sample is not None] == [["3"], ["3"]]


async def test_a_server_that_ends_or_does_not_start_fails_the_episode_and_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="the MCP server 'numbers' ended during a call of stop"):
        await play(tmp_path, [call("stop"), "Done.<|im_end|>"], mcp={"numbers": STDIO})
    gone = {"command": [sys.executable, "-c", "raise SystemExit(3)"]}
    with pytest.raises(EpisodeError, match=r"rollout.settings.mcp.gone: the server cannot be used"):
        await play(tmp_path, [], mcp={"gone": gone})


@pytest.mark.parametrize("during", ["a call", "a turn of the policy"])
async def test_a_server_over_http_that_dies_in_an_episode_fails_it_and_is_no_result(
    tmp_path: Path, unused_tcp_port: int, during: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), str(unused_tcp_port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await _until_it_listens(unused_tcp_port)

        def reply(prompt: str) -> str:
            if "<tool_response>" not in prompt:
                return call("add", number=3)
            if during == "a turn of the policy":
                process.kill()
            return call("stop")

        mcp = {"numbers": {"url": f"http://127.0.0.1:{unused_tcp_port}/mcp"}}
        async with agent_setup(tmp_path, reply, settings={"mcp": mcp}) as (setup, _):
            with pytest.raises(EpisodeError, match=r"the connection to the MCP server 'numbers' ended: \w+Error"):
                await make_rollout(setup)({"question": "Count."})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_episode_waits_for_a_server_that_restarts_and_fails_without_one(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    mcp = {"numbers": {"url": f"http://127.0.0.1:{unused_tcp_port}/mcp"}}
    with pytest.raises(EpisodeError, match=r"rollout.settings.mcp.numbers: the server cannot be used: ConnectError"):
        await play(tmp_path, [], mcp=mcp)
    playing = asyncio.create_task(play(tmp_path, [call("add", number=3), "Three.<|im_end|>"], mcp=mcp))
    await asyncio.sleep(0.3)
    async with serving(port=unused_tcp_port):
        assert results(await playing)[0].isdigit()


async def _until_it_listens(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


@pytest.mark.parametrize("value", ["s3cret-token", "Bearer s3cret-token"])
async def test_a_server_gets_the_authorization_of_an_environment_variable_and_the_sample_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NUMBERS_TOKEN", value)
    async with serving(b"Bearer s3cret-token") as url:
        mcp = {"numbers": {"url": url, "authorization_env": "NUMBERS_TOKEN"}}
        sample = await play(tmp_path, [call("add", number=3), "Three.<|im_end|>"], mcp=mcp)
        assert results(sample)[0].isdigit()
        assert b"s3cret" not in msgspec.msgpack.encode(sample.facts) + repr(sample.messages).encode()
        monkeypatch.setenv("NUMBERS_TOKEN", "another-secret")
        with pytest.raises(EpisodeError, match=r"rollout.settings.mcp.numbers: the server cannot be used") as caught:
            await play(tmp_path, [], mcp=mcp)
        assert "another-secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "the environment variable NUMBERS_TOKEN is not set"),
        ("s3cret\nX: 1", "characters that a header cannot have"),
    ],
)
async def test_an_authorization_that_cannot_be_sent_stops_the_run_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("NUMBERS_TOKEN", value)
    mcp = {"numbers": {"url": "http://127.0.0.1:9/mcp", "authorization_env": "NUMBERS_TOKEN"}}
    with pytest.raises(RunError, match=message) as caught:
        await play(tmp_path, [], mcp=mcp)
    assert "s3cret" not in str(caught.value)


async def test_faulty_settings_of_servers_name_the_setting(tmp_path: Path) -> None:
    async with serving() as url:
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "name at least one function, or an MCP server"),
            ({"mcp": {"a": {}}}, "set either command or url"),
            ({"mcp": {"a": {**STDIO, "authorization_env": "X"}}}, "authorization_env is for a server with a url"),
            ({"mcp": {"a": {"url": url, "tools": ["add", "sing"]}}}, "has no sing; it has add, divide, stop"),
            ({"mcp": {"a": {"url": url}, "b": {"url": url}}}, "two tools are named add, divide, stop"),
        ]
        for settings, message in cases:
            with pytest.raises(RunError, match=message):
                await play(tmp_path, [], **settings)
