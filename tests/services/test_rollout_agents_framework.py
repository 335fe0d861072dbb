"""An unmodified agent framework, the OpenAI Agents SDK, plays an episode with tool calls. It has its own virtual environment."""

from pathlib import Path
from typing import Any

import pytest

from rollbook.rollout.agents.rollout import make_rollout
from tests.parts.rollout.agents import agent_setup, assert_matches_engine

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "agents" / "bin" / "python"
AGENT = ROOT / "examples" / "07_agent_proxy" / "weather_agent.py"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-agents installs the framework")


def policy(prompt: str) -> str:
    """Calls the tool for both cities, with two layouts of JSON, then replies with the results."""
    if prompt.count("<tool_response>") == 0:
        return 'I look.<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call><|im_end|>'
    if prompt.count("<tool_response>") == 1:
        return '<tool_call>\n{ "name" : "get_weather", "arguments": { "city": "Oslo" } }\n</tool_call><|im_end|>'
    return ("Paris 21, Oslo 7" if "21 degrees" in prompt and "7 degrees" in prompt else "no idea") + "<|im_end|>"


def reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    return float(result == {"answer": row["answer"]})


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_an_agent_framework_plays_an_episode_with_the_exact_tokens_of_the_engine(
    tmp_path: Path, api: str
) -> None:
    settings = {
        "command": [str(PYTHON), str(AGENT)],
        "environment": {"AGENT_API": api},
        "reward": f"{__name__}:reward",
    }
    async with agent_setup(tmp_path, policy, settings=settings) as (setup, record):
        sample = await make_rollout(setup)({"question": "Paris and Oslo?", "answer": "Paris 21, Oslo 7"})
    assert sample is not None
    assert sample.reward == 1.0
    assert len(sample.turns) == 3
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)
    assert [message["role"] for message in sample.messages or ()] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
