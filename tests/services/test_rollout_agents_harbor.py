"""Coding agents in the images of Harbor tasks: programs and files that they find, the verifier after them, who is at fault."""

import asyncio
import os
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.program import AgentLog
from rollbook.rollout.agents.rollout import make_rollout
from rollbook.rollout.agents.session import ProxySession
from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.sandbox import Image, Limits, Sandbox
from tests.parts.concurrency.until import until
from tests.parts.rollout.agents import EngineRecord, agent_setup, assert_matches_engine, scripted_agent
from tests.parts.sandbox.bubblewrap import require_bubblewrap
from tests.parts.sandbox.harbor import TOML, keep_images_in, write_task

IMAGES = {"*": "host"}
SOLVE = "echo hello > /app/greeting.txt"


@pytest.fixture(autouse=True)
def _images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_bubblewrap()
    keep_images_in(tmp_path / "images", monkeypatch)


async def play(
    tmp_path: Path, command: str, *, path: Path | None = None, **settings: Any
) -> tuple[RolloutSample, EngineRecord]:
    all_settings = {**scripted_agent(tmp_path / "bin", command), "reward": "harbor", "images": IMAGES, **settings}
    return await play_row(tmp_path, path or write_task(tmp_path), all_settings)


async def play_row(tmp_path: Path, task: Path, settings: dict[str, Any]) -> tuple[RolloutSample, EngineRecord]:
    row = {"instruction": "Write the word hello into greeting.txt.", "path": str(task)}
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", settings=settings) as (setup, record):
        sample = await make_rollout(setup)(row)
    assert sample is not None
    return sample, record


async def test_an_agent_works_in_the_image_of_the_task_and_the_verifier_judges_its_files(tmp_path: Path) -> None:
    sample, record = await play(
        tmp_path, f'cat data/readme.txt start.txt; tool; pwd; test -z "$WORD"; ls /tests; {SOLVE}'
    )
    assert sample.facts["agent_log"].split()[:6] == ["a", "note", "start", "tool", "/app", "ls:"], sample.facts
    assert (sample.reward, sample.solved, sample.facts["rewards"]) == (1.0, True, {"reward": 1.0})
    assert_matches_engine(sample, record)


COMMAND = """\
import json, os, subprocess, sys, urllib.request
task = json.load(sys.stdin)["instruction"]
headers = {"content-type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": task}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
subprocess.run(["sh", "-c", "tool; pwd; " + sys.argv[1]], check=True)
"""


async def test_a_command_of_ones_own_works_in_the_image_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    settings = {"command": [sys.executable, str(tmp_path / "agent.py"), SOLVE], "reward": "harbor", "images": IMAGES}
    sample, record = await play_row(tmp_path, write_task(tmp_path), settings)
    assert sample.facts["agent_log"].split() == ["tool", "/app"], sample.facts
    assert (sample.reward, sample.facts["sandbox"]) == (1.0, "bubblewrap"), sample.facts
    assert_matches_engine(sample, record)


@pytest.mark.parametrize(
    "command",
    [
        "echo goodbye > greeting.txt",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; (sleep 1; echo hello > greeting.txt) &",
        "mkdir -p ~/bin; echo 'echo hello' > ~/bin/cat; chmod 755 ~/bin/cat; echo 'PATH=~/bin:$PATH' > ~/.bashrc",
    ],
    ids=["wrong", "its own reward", "its own programs"],
)
async def test_an_agent_that_does_not_solve_the_task_gets_0(tmp_path: Path, command: str) -> None:
    sample, _ = await play(tmp_path, command)
    assert (sample.reward, sample.solved) == (0.0, False), sample.facts


async def test_what_an_agent_did_until_its_deadline_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = asyncio.Event()
    add = AgentLog.add

    def add_and_notify(log: AgentLog, data: bytes) -> None:
        add(log, data)
        printed.set()

    async def out_of_time(session: ProxySession) -> None:
        await printed.wait()
        session._end = EndReason.TIME

    monkeypatch.setattr(AgentLog, "add", add_and_notify)
    monkeypatch.setattr(ProxySession, "out_of_time", out_of_time)
    sample, _ = await play(tmp_path, f"{SOLVE}; echo written; sleep 987654")
    assert (sample.reward, sample.finish_reason) == (1.0, EndReason.TIME), sample.facts
    assert sample.facts["agent_log"] == "written"


async def test_an_agent_that_exceeds_a_limit_of_its_sandbox_gets_0(tmp_path: Path) -> None:
    sample, _ = await play(
        tmp_path, f"{SOLVE}; while :; do sleep 9 & done", sandbox_limits={"processes": 40, "memory_mb": 512}
    )
    assert sample.reward == 0.0
    assert "the sandbox ended the agent" in sample.facts["agent_error"]


async def test_an_agent_that_is_killed_is_scored_if_its_own_commands_did_it(tmp_path: Path) -> None:
    sample, _ = await play(tmp_path, f"{SOLVE}; kill -9 $PPID")
    assert sample.reward == 1.0
    assert "code -9" in sample.facts["agent_error"]

    def agents() -> list[int]:
        running = psutil.process_iter(["cmdline", "ppid"])
        return [one.info["ppid"] for one in running if one.info["cmdline"] == ["sleep", "31558"]]

    playing = asyncio.create_task(play(tmp_path, f"{SOLVE}; exec sleep 31558"))
    await until(lambda: len(agents()) == 1)
    os.kill(agents()[0], signal.SIGKILL)
    with pytest.raises(EpisodeError, match=r"killed .* from outside"):
        await playing


async def test_a_verifier_that_gives_no_reward_makes_the_episode_unscorable(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"wrote neither reward.txt nor reward.json"):
        await play(tmp_path, SOLVE, path=write_task(tmp_path, test="exit 3\n"))


async def test_the_limits_are_the_larger_ones_of_task_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Limits] = []

    def opens(image: Image, limits: Limits, **settings: Any) -> AbstractAsyncContextManager[Sandbox]:
        opened.append(limits)
        return open_sandbox(image, limits, **settings)

    monkeypatch.setattr("rollbook.sandbox.harbor.trial.open_sandbox", opens)
    task = write_task(tmp_path, toml=TOML.replace("memory_mb = 512", "memory_mb = 700"))
    await play(tmp_path, SOLVE, path=task, sandbox_limits={"memory_mb": 600, "processes": 300})
    assert [(one.memory_mb, one.processes, one.disk_mb) for one in opened] == [(700, 300, 64)]


async def test_an_agent_whose_interpreter_is_not_in_the_root_of_the_task_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "root" / "usr").mkdir(parents=True)
    images = {"python:3.11-slim": str(tmp_path / "root")}
    settings = {**scripted_agent(tmp_path / "bin", "true"), "reward": "harbor", "images": images}
    (tmp_path / "bin" / "mini").write_text("#!/usr/bin/perl\n")
    with pytest.raises(
        RunError, match=r"/usr/bin/perl is not in .*root, the root of python:3.11-slim: install it there"
    ):
        async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", settings=settings) as (setup, _):
            await make_rollout(setup)({"instruction": "?", "path": str(write_task(tmp_path))})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": "none"}, 'sandbox = "none" and workspace are not possible'),
        ({"workspace": "somewhere"}, "workspace are not possible"),
        ({"agent": "a:b", "environment": {}}, "needs a program that runs in the image"),
        ({"reward": "a:b"}, 'images: only with reward = "harbor"'),
    ],
)
async def test_settings_that_harbor_tasks_cannot_have_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        await play(tmp_path, SOLVE, **settings)
