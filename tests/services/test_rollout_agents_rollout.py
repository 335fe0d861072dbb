"""The rollout function for unmodified agents: functions, threads, commands; rewards, failures and limits."""

import asyncio
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents import sandboxed
from rollbook.rollout.agents.program import AgentLog, command_program, run_in_thread
from rollbook.rollout.agents.rollout import make_rollout
from rollbook.rollout.agents.session import ProxySession
from rollbook.rollout.contract import ChatSession
from rollbook.rollout.policy import EpisodeContext, enter_episode
from rollbook.rollout.settings import TO_BE_SCORED, EpisodeLimits
from tests.parts.rollout.agents import EngineRecord, agent_setup, assert_matches_engine, scripted_agent
from tests.parts.sandbox.bubblewrap import require_bubblewrap

PROGRAMS = "tests.parts.rollout.agent_programs"
REWARD = f"{PROGRAMS}:reward"
COMMAND = [sys.executable, "-m", PROGRAMS]
ROOT = Path(__file__).parents[2]
ROW: dict[str, Any] = {"questions": ["one?", "two?"], "answer": "yes"}


async def play(
    tmp_path: Path, row: dict[str, Any], limits: EpisodeLimits | None = None, publication: int = 3, **settings: Any
) -> tuple[RolloutSample | None, EngineRecord]:
    async with agent_setup(
        tmp_path, lambda _: "yes<|im_end|>", settings=settings, limits=limits, publication=publication
    ) as (setup, record):
        return await make_rollout(setup)(row), record


@pytest.mark.parametrize(
    "program",
    [
        {"agent": f"{PROGRAMS}:converse"},
        {"agent": f"{PROGRAMS}:converse_in_a_thread"},
        {"command": COMMAND, "environment": {"PYTHONPATH": str(ROOT)}},
        {
            "command": COMMAND,
            "environment": {"PYTHONPATH": str(ROOT)},
            "sandbox": "bubblewrap",
            "reads": [str(ROOT / "tests")],
        },
    ],
    ids=["async", "thread", "command", "confined command"],
)
async def test_an_unmodified_agent_gives_a_sample(tmp_path: Path, program: dict[str, Any]) -> None:
    if "sandbox" in program:
        require_bubblewrap()
    sample, record = await play(tmp_path, ROW, reward=REWARD, **program)
    assert sample is not None
    assert sample.reward == 1.0
    assert len(sample.sequences) == 1
    assert_matches_engine(sample, record)


async def test_a_reward_function_may_be_async_and_without_one_the_agent_returns_the_reward(tmp_path: Path) -> None:
    sample, _ = await play(tmp_path, ROW, agent=f"{PROGRAMS}:converse", reward=f"{PROGRAMS}:async_reward")
    assert sample is not None
    assert sample.reward == 4.0
    with pytest.raises(EpisodeError, match="the agent returned 'yes'; it must return a number"):
        await play(tmp_path, ROW, agent=f"{PROGRAMS}:converse")


@pytest.mark.parametrize(("returned", "solved"), [(True, True), (False, False), (1, None)])
async def test_a_reward_of_true_or_false_says_whether_the_task_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: float, solved: bool | None
) -> None:
    monkeypatch.setattr(f"{PROGRAMS}.reward", lambda *_: returned)
    sample, _ = await play(tmp_path, ROW, agent=f"{PROGRAMS}:converse", reward=REWARD)
    assert sample is not None
    assert (sample.reward, sample.solved) == (float(returned), solved)


async def test_an_unscorable_sample_has_no_reward_and_keeps_its_tokens(tmp_path: Path) -> None:
    sample, record = await play(tmp_path, {**ROW, "is_unscorable": True}, agent=f"{PROGRAMS}:converse", reward=REWARD)
    assert sample is not None
    assert (sample.reward, sample.invalid_cause) == (None, "could not be scored: None")
    assert_matches_engine(sample, record)


async def test_the_reward_functions_of_the_run_may_score_the_return_value(tmp_path: Path) -> None:
    sample, record = await play(tmp_path, ROW, agent=f"{PROGRAMS}:converse", reward="rollout.rewards")
    assert sample is not None
    assert (sample.invalid_cause, sample.facts["result"]) == (TO_BE_SCORED, "yes")
    assert_matches_engine(sample, record)


async def test_an_agent_error_is_scored_only_if_the_settings_say_so(tmp_path: Path) -> None:
    broken = f"{PROGRAMS}:break_after_a_turn"
    with pytest.raises(EpisodeError, match="the agent raised ValueError: I cannot parse that"):
        await play(tmp_path, ROW, agent=broken, reward=REWARD)
    sample, _ = await play(tmp_path, ROW, agent=broken, reward=REWARD, on_agent_error="score")
    assert sample is not None
    assert sample.reward == -1.0
    assert "cannot parse" in sample.facts["agent_error"]
    with pytest.raises(EpisodeError, match="ended with code 1: the agent is lost"):
        await play(tmp_path, {**ROW, "fail": True}, command=COMMAND, reward=REWARD)


async def test_an_episode_at_a_limit_has_a_reward_even_if_the_agent_raises(tmp_path: Path) -> None:
    sample, record = await play(tmp_path, ROW, EpisodeLimits(max_turns=1), agent=f"{PROGRAMS}:converse", reward=REWARD)
    assert sample is not None
    assert (sample.finish_reason, sample.reward) == (EndReason.MAX_TURNS, -1.0)
    assert_matches_engine(sample, record)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("while :; do sleep 9 & done", "the sandbox ended the agent: the code used"),
        ("kill -9 $PPID", "the agent's command ended with code -9"),
        ("mkdir -p closed; chmod 0 closed", "cannot be copied out"),
        ("head -c 80M /dev/zero > large", "cannot be copied out"),
        ("truncate -s 1T holes", "cannot be copied out"),
        ("mkdir -p $(printf 'd/%.0s' $(seq 1500))", "cannot be copied out"),
        ("mkdir -p $(printf 'directories/%.0s' $(seq 110))", "cannot be copied out"),
    ],
    ids=[
        "processes",
        "its own end",
        "files without rights",
        "files that are too large",
        "a large file of holes",
        "deep directories",
        "long paths",
    ],
)
async def test_what_the_commands_of_an_agent_ruin_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, error: str
) -> None:
    require_bubblewrap()
    monkeypatch.setattr(sandboxed, "MAX_WORK_BYTES", 2**24)
    monkeypatch.setattr(sandboxed, "COPY_S", 6.0)  # less than it takes to read all of the large file
    settings = scripted_agent(tmp_path / "bin", command)
    settings |= {"sandbox_limits": {"processes": 40}, "reward": f"{__name__}:files_of_the_workspace"}
    sample, _ = await play(tmp_path, {"task": "?", "files": {"start.txt": ""}}, **settings)
    assert sample is not None
    assert error in sample.facts["agent_error"]
    assert sample.reward == (2 if "-9" in error else 1), "files are those of the start, unless they could be copied out"


CONFINED = """\
import json, os, pathlib, sys, urllib.request
row = json.load(sys.stdin)
pathlib.Path("made.txt").write_text("by the agent")
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": row["question"]}]}).encode()
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
reply = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
seen = [name for name in ("given", "secret") if pathlib.Path(row[name]).exists()]
print(json.dumps({"reply": reply, "seen": seen, "is_in_work": row["workspace"] == os.getcwd(), "key": os.environ.get("KEY")}))
"""


async def test_a_confined_command_sees_the_files_it_is_given_and_its_working_directory_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bubblewrap()
    monkeypatch.setenv("KEY", "a secret of this process")
    (tmp_path / "agent.py").write_text(CONFINED)
    given, secret = tmp_path / "given", tmp_path / "secret"
    given.mkdir()
    secret.write_text("of this machine")
    row = {"question": "one?", "given": str(given), "secret": str(secret), "files": {"start.txt": ""}}
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"command": [sys.executable, "agent.py"], "sandbox": "bubblewrap", "reads": ["given"]}
    sample, record = await play(tmp_path, row, **settings, reward=f"{__name__}:result_and_files")
    assert sample is not None
    assert sample.facts["sandbox"] == "bubblewrap"
    assert sample.reward == 2.0, "start.txt and made.txt"
    assert_matches_engine(sample, record)


def result_and_files(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    assert result == {"reply": "yes", "seen": ["given"], "is_in_work": True, "key": None}, result
    return files_of_the_workspace(row, result, messages)


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
async def test_the_log_of_an_agent_that_is_ended_at_the_deadline_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    if sandbox == "bubblewrap":
        require_bubblewrap()
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
    settings = scripted_agent(tmp_path / "bin", "echo I am still looking >&2; sleep 987654")
    settings |= {"sandbox": sandbox, "reward": f"{__name__}:files_of_the_workspace"}
    sample, _ = await play(tmp_path, {"task": "?"}, **settings)
    assert sample is not None
    assert (sample.finish_reason, sample.reward) == (EndReason.TIME, 1.0), "late.txt is scored"
    assert sample.facts["agent_log"] == "I am still looking"


async def test_a_coding_agent_that_does_not_work_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    settings = scripted_agent(tmp_path / "bin", "")
    (tmp_path / "bin" / "mini").write_text("#!/bin/sh\necho No module named mcp >&2; exit 1\n")
    settings |= {"sandbox": "none", "reward": f"{__name__}:files_of_the_workspace"}
    with pytest.raises(EpisodeError, match=r"(?s)code 1: No module named mcp.*no request.*pip install mini-swe-agent"):
        await play(tmp_path, {"task": "?"}, **settings)


async def test_an_agent_that_is_too_slow_to_start_is_told_apart_from_one_that_ignores_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def out_of_time(session: ProxySession) -> None:
        session._end = EndReason.TIME

    monkeypatch.setattr(ProxySession, "out_of_time", out_of_time)
    settings = scripted_agent(tmp_path / "bin", "")
    (tmp_path / "bin" / "mini").write_text("#!/bin/sh\nsleep 987654\n")
    settings |= {"sandbox": "none", "reward": f"{__name__}:files_of_the_workspace"}
    with pytest.raises(EpisodeError, match=r"the time of the episode is over; .*gate.max_groups_in_flight"):
        await play(tmp_path, {"task": "?"}, **settings)


async def test_an_agent_that_is_installed_in_the_home_directory_does_not_see_the_files_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bubblewrap()
    home = tmp_path / "home"
    settings = scripted_agent(home, f"cat {home}/key && touch found; test -x {home}/mini && touch program")
    (home / "key").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    sample, _ = await play(tmp_path, {"task": "?"}, **settings, reward=f"{__name__}:names_in_the_workspace")
    assert sample is not None
    assert sample.reward == len("late.txtprogram")


def names_in_the_workspace(row: dict[str, Any], _result: Any, _messages: list[Any]) -> float:
    return float(sum(len(file.name) for file in Path(row["workspace"]).iterdir()))


def files_of_the_workspace(row: dict[str, Any], _result: Any, _messages: list[Any]) -> float:
    return float(len(list(Path(row["workspace"]).iterdir())))


async def test_an_outage_is_never_a_reward_even_if_the_agent_catches_the_error(tmp_path: Path) -> None:
    enter_episode(EpisodeContext(group_id=GroupId("t@0"), min_publication=9, until=time.monotonic() + 4))
    with pytest.raises(TransientError, match="publication 9 or newer"):
        await play(tmp_path, ROW, agent=f"{PROGRAMS}:catch_everything", reward=REWARD)


async def test_forty_plain_agents_run_concurrently(tmp_path: Path) -> None:
    """Each agent needs its own thread: with a shared pool the last ones would wait for the first."""
    settings = {"agent": f"{PROGRAMS}:wait_for_the_others", "reward": REWARD}
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", settings=settings) as (setup, _):
        rollout = make_rollout(setup)
        samples = await asyncio.gather(*(rollout(dict(ROW)) for _ in range(40)))
    assert [sample.reward for sample in samples if sample is not None] == [1.0] * 40


async def test_an_agent_without_a_policy_request_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"without a request to the policy \(it returned 1\.0\)"):
        await play(tmp_path, ROW, agent=f"{PROGRAMS}:send_nothing")


@pytest.mark.parametrize("error", [ValueError, StopIteration, SystemExit])
async def test_any_error_of_a_plain_function_is_raised_at_once(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("no more")

    async with asyncio.timeout(30):
        with pytest.raises(Exception, match="no more"):
            await run_in_thread(fail)


async def test_only_the_end_of_what_a_command_prints_is_kept() -> None:
    """The command prints 64 MB and does not read its input."""
    prints = "import sys\nfor _ in range(64):\n    print('x' * 2**20)\n    sys.stderr.write('y' * 2**16)\nprint(7)"
    session, log = cast(ChatSession, SimpleNamespace(base_url="http://127.0.0.1", id="none")), AgentLog()
    tracemalloc.start()
    try:
        assert await command_program([sys.executable, "-c", prints], {})(dict(ROW), session, log) == 7
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()
    assert set(log.text) == {"y"}


async def test_a_command_is_killed_when_its_episode_is_cancelled(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", settings={"command": COMMAND}) as (setup, _):
        episode = asyncio.ensure_future(make_rollout(setup)({**ROW, "hang": str(pid_file)}))
        async with asyncio.timeout(60):
            while not pid_file.exists() or not pid_file.read_text():  # noqa: ASYNC110  # a file cannot be awaited
                await asyncio.sleep(0.02)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
    assert not psutil.pid_exists(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either agent or command"),
        ({"agent": "a:b", "command": ["x"]}, "either agent or command"),
        ({"agent": "a:b", "colour": 1}, "colour: unknown field"),
        ({"agent": "codx"}, r"is no coding agent \(codex, .* module:function; did you mean 'codex'\?"),
        ({"agent": "nowhere:agent"}, "rollout.settings.agent = 'nowhere:agent': no module 'nowhere'"),
        ({"agent": f"{PROGRAMS}:converse", "environment": {"A": "b"}}, "environment is only for programs"),
        ({"agent": f"{PROGRAMS}:converse", "arguments": ["-x"]}, "arguments: only for a coding agent"),
        ({"agent": f"{PROGRAMS}:converse", "sandbox": "bubblewrap"}, "sandbox: only for a coding agent or a command"),
        ({"command": ["x"], "workspace": "."}, "workspace: only for a coding agent .* or for a command with sandbox"),
        ({"command": ["x"], "sandbox": "none", "reads": ["."]}, "reads: only for a coding agent"),
        ({"agent": "codex", "reward": REWARD, "reads": ["."]}, "reads: only for a command"),
        ({"command": ["no-such-program"], "sandbox": "bubblewrap"}, "there is no program 'no-such-program'"),
        (
            {"command": COMMAND, "sandbox": "bubblewrap", "reads": ["/nowhere"]},
            "reads: /nowhere: there is no such file",
        ),
        ({"agent": "codex"}, "agent = 'codex' returns a text, so a reward is required"),
        ({"agent": "pi", "reward": REWARD, "sandbox": "e2b"}, 'sandbox = "e2b": an agent is bound into'),
        ({"agent": "pi", "reward": REWARD, "sandbox_limits": {"colour": 1}}, "colour: there is no such limit"),
        (
            {"agent": "codex", "reward": REWARD, "environment": {"PATH": "/nowhere"}},
            "the program 'codex' is not installed; install it with: npm install -g @openai/codex",
        ),
    ],
)
async def test_faulty_settings_are_refused_before_an_episode_is_played(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        await play(tmp_path, ROW, **settings)
