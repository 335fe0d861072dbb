"""The `openenv` package as client and as server. It is in a separate virtual environment: scripts/openenv_venv.sh."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.plugin import PluginError
from rollbook.envs.client.group import GrpoPool
from rollbook.envs.client.session import ClientOptions, GroupTooLargeError, open_session
from tests.parts.envs.environments import served

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ROLLBOOK_OPENENV_PYTHON", ROOT / ".venvs/openenv/bin/python"))
PEER = ROOT / "tests/parts/envs/openenv_peer.py"
COUNTER = ClientOptions(task_field=None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no virtual environment with openenv; run scripts/openenv_venv.sh"),
]


async def peer_output(*args: str) -> dict[str, object]:
    child = await asyncio.create_subprocess_exec(PYTHON, PEER, *args, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    output: dict[str, object] = json.loads(out)
    return output


SERVERS: dict[str, list[str | Path]] = {
    "openenv": [PEER, "serve"],
    "ours": ["-P", "-m", "rollbook", "env", "serve", "--openenv", f"{PEER.stem}:Counter", "--pool-size=4", "--port=0"],
}
"""Both serve the same class. Ours imports it from the current directory."""


@contextmanager
def counter_served_by(server: str) -> Iterator[str]:
    child = subprocess.Popen(
        [PYTHON, *SERVERS[server]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PEER.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    try:
        output = ""
        while (found := re.search(r"http://[\d.:]+", output)) is None:
            line = child.stdout.readline()
            assert line, f"the server ended: {output}"
            output += line
        yield found[0]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def until_ready(url: str) -> None:
    """The openenv server prints its address before it listens."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with open_session(url, COUNTER):
                    return
            except Exception:
                await asyncio.sleep(0.1)


async def test_the_openenv_client_plays_an_episode_on_our_server() -> None:
    async with served("number_guessing", size=1) as server:
        episode = await peer_output("play", server.url)
        assert server.pool.health().busy == 0
    assert episode["texts"] == ["guess a number from 0 to 15", "lower", "higher", "correct"]
    assert (episode["reward"], episode["solved"], episode["again"]) == (0.84, True, "guess a number from 0 to 15")
    assert isinstance(episode["state"], dict)
    assert episode["state"]["step_count"] == 3
    assert "EXECUTION_ERROR" in str(episode["errors"])
    assert "VALIDATION_ERROR" in str(episode["errors"])


async def test_the_mcp_client_of_openenv_plays_on_our_server() -> None:
    async with served("number_guessing", size=1) as server:
        seen = await peer_output("mcp", server.url)
        assert server.pool.health().busy == 0, "the client closed its session"
    assert seen["tools"] == ["act"]
    assert seen["result"] in ("higher", "lower", "correct")
    assert seen["steps"] == 1
    assert isinstance(seen["texts"], list)
    assert seen["texts"][0] == seen["texts"][1], "the same seed picks the same task"
    assert isinstance(seen["over_ws"], list)
    listed, called = seen["over_ws"]
    assert listed["data"]["result"]["tools"][0]["name"] == "act"
    assert called["data"]["result"]["data"] == seen["result"], "the seed picked the same task again"


async def test_the_validator_of_openenv_passes_all_its_criteria() -> None:
    async with served("number_guessing", size=1) as server:
        child = await asyncio.create_subprocess_exec(
            PYTHON, "-m", "openenv.cli", "validate", "--url", server.url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await child.communicate()
    assert child.returncode == 0, out
    assert out.decode().count("PASS  ") == 6, out
    assert "Verdict: PASS" in out.decode()


async def test_openenv_clients_are_refused_if_our_server_is_full() -> None:
    async with served("number_guessing", size=2, connect_wait_s=0.1) as server:
        crowd = await peer_output("crowd", server.url, "4")
        assert server.pool.health().busy == 0
    assert crowd["connected"] == 2
    assert "503" in str(crowd["refused"])


@pytest.mark.parametrize("server", SERVERS)
async def test_our_client_plays_an_openenv_environment_on_both_servers(server: str) -> None:
    with counter_served_by(server) as url:
        await until_ready(url)
        async with open_session(url, COUNTER) as environment:
            first = await environment.reset({"target": 5}, episode_id="mine")
            middle = await environment.step({"amount": 2})
            with pytest.raises(EpisodeError, match="thirteen breaks this environment"):
                await environment.step({"amount": 13})
            with pytest.raises(EpisodeError, match="VALIDATION_ERROR"):
                await environment.step({"amount": "many"})
            last = await environment.step({"amount": 3})
            state = await environment.state()
        assert json.loads(first.text) == {"total": 0}
        assert (json.loads(middle.text), middle.done) == ({"total": 2}, False)
        assert (json.loads(last.text), last.reward, last.done) == ({"total": 5}, 1.0, True)
        assert (state["episode_id"], state["step_count"], state["history"]) == ("mine", 2, [2, 3])


@pytest.mark.parametrize("server", SERVERS)
async def test_our_group_connects_completely_to_both_servers(server: str) -> None:
    with counter_served_by(server) as url:
        await until_ready(url)
        for _ in range(
            3
        ):  # its slots are freed while its environments are still closing: connects wait instead of failing
            async with GrpoPool(url, size=4, first_task={"target": 3}, options=COUNTER) as pool:
                seen = await pool.run_group_step([{"amount": n} for n in (1, 2, 3, 4)])
                assert [json.loads(answer.text)["total"] for answer in seen] == [1, 2, 3, 4]
        with pytest.raises(GroupTooLargeError, match=r"5 sessions .* has 4"):
            await GrpoPool(url, size=5, options=COUNTER).connect()
        async with GrpoPool(url, size=4, options=COUNTER) as pool:
            assert len(pool.envs) == 4


def test_a_class_that_cannot_be_hosted_is_refused_with_a_reason() -> None:
    code = (
        "from rollbook.envs.server.openenv import OpenEnvPool\n"
        "for path in ('nowhere', 'no.such.module:Env', 'json:JSONDecoder'):\n"
        "    try: OpenEnvPool(path, {}, size=1)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    out = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ).stdout.splitlines()
    assert [line.split()[0] for line in out] == [PluginError.__name__, PluginError.__name__, RunError.__name__]
    assert "module:" in out[0]
    assert "no module 'no.such.module'" in out[1]
    assert "missing: reset, step, state" in out[2]
