"""Real coding agents and clients play an episode through the proxy: Codex, Claude Code, pi with each of its APIs, mini-swe-agent.

They have their own environment (`make test-agents`). The policy is scripted; the programs, their requests and commands are real.
"""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.coding_agents import CODING_AGENTS, launch_pi
from rollbook.rollout.agents.rollout import make_rollout
from rollbook.rollout.settings import EpisodeLimits
from rollbook.sandbox.bubblewrap import Kind
from tests.parts.rollout.agents import EngineRecord, Reply, agent_setup, assert_matches_engine
from tests.parts.sandbox.bubblewrap import require
from tests.parts.sandbox.harbor import keep_images_in, write_task

ROOT = Path(__file__).parents[2]
BINS = (ROOT / ".venvs" / "agents" / "npm" / "node_modules" / ".bin", ROOT / ".venvs" / "agents" / "bin")
PATH = os.pathsep.join([*map(str, BINS), os.environ["PATH"]])
TASK = {"instruction": "Write the word rollbook into the file answer.txt", "files": {"notes.txt": "be brief"}}
LONG = EpisodeLimits(max_turns=30, max_total_tokens=120_000, max_seconds=90)


def is_installed(agent: str) -> bool:
    return shutil.which(CODING_AGENTS[agent].program, path=PATH) is not None


def needs(agent: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_installed(agent), reason=f"{agent} is not installed (make test-agents)")


CONFINED = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def reward(row: dict[str, Any], _result: Any, _messages: list[Any]) -> float:
    file = Path(row["workspace"], "answer.txt")
    return float(file.exists() and file.read_text(encoding="utf-8").strip() == "rollbook")


WRITE = "cat notes.txt; printf rollbook > answer.txt"
CALLS = {
    "codex": call("exec_command", {"cmd": WRITE}),
    "claude-code": call("Bash", {"command": WRITE, "description": "write"}),
    "pi": call("bash", {"command": WRITE}),
    "mini-swe-agent": call("bash", {"command": WRITE}),
}
FINISH = call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})


def policy(agent: str) -> Reply:
    """Runs one command, then ends."""

    def reply(prompt: str) -> str:
        if '"name": ' not in prompt.partition("<|im_end|>")[0]:
            return "A title<|im_end|>"  # a side request without tools
        if "printf rollbook" not in prompt:
            return f"I will write it.\n{CALLS[agent]}"
        return FINISH if agent == "mini-swe-agent" else "The file is written.<|im_end|>"

    return reply


async def play(
    tmp_path: Path, agent: str, reply: Reply, limits: EpisodeLimits = LONG, **settings: Any
) -> tuple[RolloutSample, EngineRecord]:
    all_settings = {
        "agent": agent,
        "sandbox": "none",
        "reward": f"{__name__}:reward",
        "environment": {"PATH": PATH},
        **settings,
    }
    async with agent_setup(
        tmp_path, reply, settings=all_settings, limits=limits, max_tokens=1000, max_model_len=130_000
    ) as (setup, record):
        sample = await make_rollout(setup)(TASK)
    assert sample is not None
    return sample, record


@pytest.mark.parametrize(
    "sandbox",
    ["none", pytest.param("bubblewrap", marks=CONFINED), pytest.param("podman", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("agent", [pytest.param(name, marks=needs(name)) for name in CODING_AGENTS])
async def test_a_coding_agent_works_in_its_directory_with_the_exact_tokens_of_the_engine(
    tmp_path: Path, agent: str, sandbox: Kind
) -> None:
    await asyncio.to_thread(require, sandbox)
    sample, record = await play(tmp_path, agent, policy(agent), sandbox=sandbox)
    assert sample.reward == 1.0, sample.facts
    assert sample.facts["sandbox"] == sandbox
    assert_matches_engine(sample, record)
    assert sample.messages is not None
    assert any("be brief" in str(message["content"]) for message in sample.messages), "it read the file of the row"
    assert "agent_log" in sample.facts


@pytest.mark.parametrize("agent", [pytest.param(name, marks=needs(name)) for name in CODING_AGENTS])
async def test_an_agent_does_not_wait_for_a_policy_whose_episode_is_over(tmp_path: Path, agent: str) -> None:
    """Programs repeat failed requests: mini-swe-agent did for minutes."""
    limits = replace(LONG, max_turns=1, max_seconds=600)
    async with asyncio.timeout(100):
        sample, record = await play(tmp_path, agent, policy(agent), limits)
    assert (sample.reward, sample.finish_reason) == (1.0, EndReason.MAX_TURNS), sample.facts
    assert_matches_engine(sample, record)


@CONFINED
@pytest.mark.parametrize("agent", [pytest.param(name, marks=needs(name)) for name in CODING_AGENTS])
async def test_a_coding_agent_works_in_the_image_of_a_harbor_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    keep_images_in(tmp_path / "images", monkeypatch)
    check = "grep -qx rollbook /app/answer.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
    dockerfile = "FROM debian:12\nWORKDIR /app\nRUN echo be brief > notes.txt\n"
    directory = write_task(tmp_path, dockerfile=dockerfile, test=check)
    settings = {"agent": agent, "reward": "harbor", "images": {"*": "host"}, "environment": {"PATH": PATH}}
    async with agent_setup(
        tmp_path, policy(agent), settings=settings, limits=LONG, max_tokens=1000, max_model_len=130_000
    ) as (setup, record):
        sample = await make_rollout(setup)({"instruction": TASK["instruction"], "path": str(directory)})
    assert sample is not None
    assert sample.reward == 1.0, sample.facts
    assert_matches_engine(sample, record)
    assert sample.messages is not None
    assert any("be brief" in str(message["content"]) for message in sample.messages), "it read the file of the image"


PI_APIS = ("openai-completions", "openai-responses", "anthropic-messages")


@needs("pi")
@pytest.mark.parametrize("api", PI_APIS)
async def test_pi_plays_the_same_episode_with_each_of_the_three_apis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.setitem(CODING_AGENTS, "pi", replace(CODING_AGENTS["pi"], launch=partial(launch_pi, api=api)))
    sample, record = await play(tmp_path, "pi", policy("pi"))
    assert sample.reward == 1.0, sample.facts
    assert (len(sample.turns), len(sample.sequences)) == (2, 1), sample.facts
    assert_matches_engine(sample, record)


def codex_with_a_sub_agent_and_a_compaction(prompt: str) -> str:
    """The main agent starts a sub-agent, prints a long text, is compacted, and writes the file."""
    if "CONTEXT CHECKPOINT COMPACTION" in prompt:
        return "Summary: the sub-agent was started, the file is not written yet.<|im_end|>"
    if "Here is the summary produced" in prompt:
        return "Done after the summary.<|im_end|>" if "printf rollbook" in prompt else CALLS["codex"]
    is_main = "<|im_start|>user\nWrite the word rollbook" in prompt
    if not is_main:
        return "There are two notes about the word.<|im_end|>"
    if "spawn_agent" not in prompt.partition("<|im_start|>user\nWrite the word")[2]:
        return call("multi_agent_v1__spawn_agent", {"message": "Count the notes in this directory, please."})
    return call("exec_command", {"cmd": "sleep 2; head -c 30000 /dev/zero | tr '\\0' 'x'", "max_output_tokens": 9000})


@needs("codex")
@pytest.mark.parametrize("train_only", ["all", "main"])
async def test_codex_with_a_sub_agent_and_a_compaction_is_one_sample_with_its_lineage(
    tmp_path: Path, train_only: str
) -> None:
    limits = EpisodeLimits(max_turns=30, max_total_tokens=120_000, max_seconds=90)
    sample, record = await play(
        tmp_path,
        "codex",
        codex_with_a_sub_agent_and_a_compaction,
        limits,
        arguments=["-c", "model_auto_compact_token_limit=40000"],
        train_only=train_only,
    )
    assert sample.reward == 1.0, sample.facts
    lineage = sample.facts["lineage"]
    roles = [entry["role"] for entry in lineage]
    assert roles[0] == "main"
    assert sorted(roles[1:]) == ["compaction", "compaction", "subagent"], lineage
    main, sub = lineage[0], lineage[roles.index("subagent")]
    assert sub["parent"] == 0
    assert sub["agent"] not in (None, main["agent"])
    assert all(entry["agent"] == main["agent"] for entry in lineage if entry["role"] == "compaction")
    left_out = {entry["sequence"]: entry.get("left_out") for entry in lineage}
    is_left_out = train_only == "main"
    assert left_out[sub["sequence"]] == ('subagent with train_only = "main"' if is_left_out else None)
    assert (sample.sequences[sub["sequence"]].num_trained == 0) is is_left_out
    assert_matches_engine(sample, record, untrained={sub["sequence"]} if is_left_out else ())
    assert "tool web_search" in sample.facts["left_out"]
    assert sample.messages is not None
    assert sample.messages[-1]["content"] == "Done after the summary."


def claude_code_with_a_sub_agent_and_a_compaction(prompt: str) -> str:
    """As with Codex. The summary is quoted without its tags and with other white space."""
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if last.startswith("CRITICAL: Respond with TEXT ONLY"):
        return (
            "<analysis>long</analysis>\n<summary>Notes were counted,\n\n\nthe file is not written.</summary><|im_end|>"
        )
    if "This session is being continued" in prompt:
        return "Done after the summary.<|im_end|>" if "printf rollbook" in prompt else CALLS["claude-code"]
    if "Write the word rollbook" not in prompt:
        return "There are two notes about the word.<|im_end|>"
    if "two notes about the word" not in prompt:
        task = {"description": "count", "prompt": "Count the notes, please.", "subagent_type": "general-purpose"}
        return call("Agent", task)
    return call("Bash", {"command": "head -c 9000 /dev/zero | tr '\\0' 'x'", "description": "print"})


@needs("claude-code")
async def test_claude_code_compacts_within_the_limit_of_the_run_and_its_sub_agent_is_left_out(tmp_path: Path) -> None:
    limits = replace(LONG, max_total_tokens=95_000)
    sample, record = await play(
        tmp_path, "claude-code", claude_code_with_a_sub_agent_and_a_compaction, limits, train_only="main"
    )
    assert sample.reward == 1.0, sample.facts
    lineage = sample.facts["lineage"]
    assert [entry["role"] for entry in lineage[:2]] == ["main", "subagent"]
    assert {entry["role"] for entry in lineage[2:]} == {"compaction"}, lineage
    assert [entry["sequence"] for entry in lineage if "left_out" in entry] == [1]
    assert_matches_engine(sample, record, untrained={1})
    assert sample.messages is not None
    assert sample.messages[-1]["content"] == "Done after the summary."


@needs("pi")
@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=CONFINED)])
async def test_an_agent_that_does_not_end_is_ended_with_all_its_processes_and_scored(
    tmp_path: Path, sandbox: str
) -> None:
    hang = f"{WRITE}; setsid sleep 987654 & sleep 987654"
    limits = EpisodeLimits(max_turns=30, max_total_tokens=120_000, max_seconds=25)
    sample, record = await play(tmp_path, "pi", lambda _: call("bash", {"command": hang}), limits, sandbox=sandbox)
    assert (sample.reward, sample.finish_reason) == (1.0, EndReason.TIME), sample.facts
    assert_matches_engine(sample, record)
    assert not [process for process in psutil.process_iter(["cmdline"]) if "987654" in (process.info["cmdline"] or ())]


ANTHROPIC_CLIENT = ROOT / "tests" / "parts" / "rollout" / "anthropic_client.py"
PYTHON = BINS[1] / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="make test-agents installs the anthropic package")
@pytest.mark.parametrize("mode", ["whole", "stream"])
async def test_the_anthropic_client_plays_an_episode_with_thinking_and_tools(tmp_path: Path, mode: str) -> None:
    def reply(prompt: str) -> str:
        if "21 degrees" in prompt:
            return "<think>\nI have it.\n</think>\n\nParis 21<|im_end|>"
        return "<think>I need the tool.</think>" + call("get_weather", {"city": "Paris"})

    settings = {"command": [str(PYTHON), str(ANTHROPIC_CLIENT), mode], "reward": "rollout.rewards"}
    async with agent_setup(tmp_path, reply, settings=settings) as (setup, record):
        sample = await make_rollout(setup)({"question": "Paris?"})
    assert sample is not None
    found = sample.facts["result"]
    assert [block["type"] for block in found["first"]["content"]] == ["thinking", "tool_use"]
    assert found["first"]["stop_reason"] == "tool_use"
    assert found["counted"] == found["first"]["usage"]["input_tokens"] == len(record.turns[0][0])
    assert [block.get("text", block.get("thinking")) for block in found["last"]["content"]] == [
        "\nI have it.\n",
        "Paris 21",
    ]
    assert found["last"]["stop_reason"] == "end_turn"
    assert found["stopped"] == {"stop_reason": "stop_sequence", "stop_sequence": "21", "text": "Paris "}
    assert found["errors"] == {
        "BadRequestError": "messages[0].content[0]: blocks of type 'image' are not supported, only text",
        "NotFoundError": found["errors"]["NotFoundError"],
    }
    assert "no episode 'other' is open here" in found["errors"]["NotFoundError"]
    assert [entry["role"] for entry in sample.facts["lineage"]] == ["main", "side"]
    assert_matches_engine(sample, record)


OPENAI_CLIENT = ROOT / "tests" / "parts" / "rollout" / "openai_client.mjs"
PACKAGES = BINS[0].parents[1]


@pytest.mark.skipif(
    not (PACKAGES / "node_modules" / "openai").exists(), reason="make test-agents installs the openai package of Node"
)
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(("api", "reasons"), [("chat", ["tool_calls", "stop"]), ("responses", ["completed"] * 2)])
async def test_the_openai_client_of_node_plays_an_episode_with_tools(
    tmp_path: Path, api: str, reasons: list[str], mode: str
) -> None:
    def reply(prompt: str) -> str:
        return "Paris 21<|im_end|>" if "21 degrees" in prompt else call("get_weather", {"city": "Paris"})

    command = ["node", str(OPENAI_CLIENT), str(PACKAGES), api, mode]
    settings = {"command": command, "reward": "rollout.rewards"}
    async with agent_setup(tmp_path, reply, settings=settings) as (setup, record):
        sample = await make_rollout(setup)({"question": "Paris?"})
    assert sample is not None
    assert sample.facts["result"] == {
        "call": ["get_weather", {"city": "Paris"}],
        "reasons": reasons,
        "text": "Paris 21",
        "errors": [["BadRequestError", 400], ["NotFoundError", 404]],
    }
    assert (len(sample.turns), len(sample.sequences)) == (2, 1)
    assert_matches_engine(sample, record)


@needs("pi")
@CONFINED
async def test_an_agent_in_a_sandbox_reaches_its_episode_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden from agents", encoding="utf-8")
    look = f"cat {secret} {Path.home()}/.profile; python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 3)\""

    def reply(prompt: str) -> str:
        return "Nothing there.<|im_end|>" if "Network is unreachable" in prompt else call("bash", {"command": look})

    limits = EpisodeLimits(max_turns=3, max_total_tokens=120_000, max_seconds=90)
    sample, record = await play(tmp_path, "pi", reply, limits, sandbox="bubblewrap")
    assert_matches_engine(sample, record)
    assert sample.messages is not None
    seen = "".join(str(message["content"]) for message in sample.messages if message["role"] == "tool")
    assert "Network is unreachable" in seen
    assert "No such file" in seen
    assert "hidden from agents" not in seen
