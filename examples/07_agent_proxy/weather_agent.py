"""An agent as its author wrote it, with the OpenAI Agents SDK. It knows nothing of training: the base URL is in its environment.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python weather_agent.py < task.json
"""

import asyncio
import json
import os
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

DEGREES = {"Paris": 21, "Oslo": 7, "Cairo": 34}


@function_tool  # type: ignore[untyped-decorator,unused-ignore]  # the SDK is not installed where types are checked
def get_weather(city: str) -> str:
    """The temperature in a city."""
    return f"{DEGREES[city]} degrees" if city in DEGREES else f"no station in {city!r}"


async def main() -> None:
    row = json.load(sys.stdin)
    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if os.environ.get("AGENT_API") == "chat" else OpenAIResponsesModel
    agent = Agent(
        name="weather",
        instructions="Answer with the temperature. Use the tool.",
        tools=[get_weather],
        model=kind(model="policy", openai_client=AsyncOpenAI()),
    )
    result = await Runner.run(agent, row["question"], max_turns=6)
    print(json.dumps({"answer": str(result.final_output)}))


if __name__ == "__main__":
    asyncio.run(main())
