"""Unmodified agent frameworks play an episode with tool calls, through the proxy and against the policy server directly.

They have their own virtual environment (`make test-agents`).
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollbook.rollout.agents.rollout import make_rollout
from tests.parts.rollout.agents import agent_setup, assert_matches_engine
from tests.parts.rollout.framework_agents import AGENTS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "agents" / "bin" / "python"
OPENAI_AGENT = ROOT / "examples" / "07_agent_proxy" / "weather_agent.py"
FRAMEWORKS = ROOT / "tests" / "parts" / "rollout" / "framework_agents.py"
TASK = {"question": "Paris and Oslo?", "answer": "Paris 21, Oslo 7"}
QUIET = {"ANONYMIZED_TELEMETRY": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-agents installs the frameworks")


def call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def policy(prompt: str) -> str:
    """Looks up both cities, then replies with the results: as text, or by smolagents' tool for the final answer."""
    if "21 degrees" not in prompt:
        return call("get_weather", {"city": "Paris"})
    if " 7 degrees" not in prompt and "\n7 degrees" not in prompt:
        return call("get_weather", {"city": "Oslo"})
    return (
        call("final_answer", {"answer": TASK["answer"]})
        if '"final_answer"' in prompt
        else f"{TASK['answer']}<|im_end|>"
    )


def reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    return float(result == {"answer": row["answer"]})


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_the_openai_agents_sdk_plays_an_episode_with_the_exact_tokens_of_the_engine(
    tmp_path: Path, api: str
) -> None:
    settings = {
        "command": [str(PYTHON), str(OPENAI_AGENT)],
        "environment": {"AGENT_API": api},
        "reward": f"{__name__}:reward",
    }
    async with agent_setup(tmp_path, policy, settings=settings) as (setup, record):
        sample = await make_rollout(setup)(TASK)
    assert sample is not None
    assert sample.reward == 1.0
    assert len(sample.turns) == 3
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)
    roles = [message["role"] for message in sample.messages or ()]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("framework", AGENTS)
async def test_a_framework_plays_an_episode_with_the_exact_tokens_of_the_engine(tmp_path: Path, framework: str) -> None:
    settings = {
        "command": [str(PYTHON), str(FRAMEWORKS), framework],
        "environment": QUIET,
        "reward": f"{__name__}:reward",
    }
    async with agent_setup(tmp_path, policy, settings=settings, max_tokens=400) as (setup, record):
        sample = await make_rollout(setup)(TASK)
    assert sample is not None
    assert sample.reward == 1.0, sample.facts
    assert len(sample.turns) == 3
    assert_matches_engine(sample, record)
    # smolagents requires a tool call in every turn.
    assert sample.facts.get("constrained_turns", []) == ([1, 2, 3] if framework == "smolagents" else [])


@pytest.mark.parametrize("framework", AGENTS)
async def test_a_framework_plays_against_the_policy_server(tmp_path: Path, framework: str) -> None:
    async with agent_setup(tmp_path, policy) as (_, record):
        process = await asyncio.create_subprocess_exec(
            str(PYTHON),
            str(FRAMEWORKS),
            framework,
            env={**os.environ, **QUIET, "OPENAI_BASE_URL": f"{record.url}/v1", "OPENAI_API_KEY": "x"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate(json.dumps(TASK).encode())
    assert process.returncode == 0, errors.decode()
    assert json.loads(out.splitlines()[-1]) == {"answer": TASK["answer"]}
    assert len(record.turns) == 3
