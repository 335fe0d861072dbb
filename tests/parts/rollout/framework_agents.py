"""One agent, written with five frameworks as their guides show it. Usage: `framework_agents.py FRAMEWORK < task.json`.

They know only `OPENAI_BASE_URL` and `OPENAI_API_KEY`. Runs in `.venvs/agents` (scripts/agents_venv.sh).
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

DEGREES = {"Paris": 21, "Oslo": 7}
INSTRUCTIONS = "Answer with the temperature. Use the tool."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather(city: str) -> str:
    return f"{DEGREES[city]} degrees"


def with_smolagents(question: str) -> str:
    from smolagents import OpenAIModel, Tool, ToolCallingAgent

    class GetWeather(Tool):  # type: ignore[misc,unused-ignore]  # not installed where types are checked
        name = "get_weather"
        description = "The temperature in a city."
        inputs = {"city": {"type": "string", "description": "its name"}}  # noqa: RUF012
        output_type = "string"

        def forward(self, city: str) -> str:
            return weather(city)

    model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[GetWeather()], model=model, max_steps=5, verbosity_level=0)
    return str(agent.run(question))


def with_langchain(question: str) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool  # type: ignore[untyped-decorator,unused-ignore]  # not installed where types are checked
    def get_weather(city: str) -> str:
        """The temperature in a city."""
        return weather(city)

    model = ChatOpenAI(model="policy").bind_tools([get_weather])
    messages: list[Any] = [SystemMessage(INSTRUCTIONS), HumanMessage(question)]
    while True:
        reply = model.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return str(reply.content)
        messages += [
            ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls
        ]


def with_pydantic_ai(question: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("policy"), instructions=INSTRUCTIONS)

    @agent.tool_plain  # type: ignore[untyped-decorator,unused-ignore]  # not installed where types are checked
    def get_weather(city: str) -> str:
        """The temperature in a city."""
        return weather(city)

    return str(agent.run_sync(question).output)


def with_litellm(question: str) -> str:
    import litellm

    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    while True:
        reply = litellm.completion(model="openai/policy", messages=messages, tools=tools).choices[0].message
        messages.append(reply.model_dump())
        if not reply.tool_calls:
            return str(reply.content)
        for call in reply.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def with_inspect(question: str) -> str:
    from inspect_ai import Task, eval  # noqa: A004
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    @tool  # type: ignore[untyped-decorator,unused-ignore]  # not installed where types are checked
    def get_weather() -> Any:
        async def execute(city: str) -> str:
            """The temperature in a city.

            Args:
                city: its name
            """
            return weather(city)

        return execute

    task = Task(
        dataset=[Sample(input=question)], solver=[system_message(INSTRUCTIONS), use_tools(get_weather()), generate()]
    )
    with tempfile.TemporaryDirectory() as logs:
        # Inspect's name for any server with OpenAI's API. Its base URL is read from a variable with the same name.
        os.environ.update(
            ROLLBOOK_BASE_URL=os.environ["OPENAI_BASE_URL"], ROLLBOOK_API_KEY=os.environ["OPENAI_API_KEY"]
        )
        (log,) = eval(task, model="openai-api/rollbook/policy", log_dir=logs, display="none")
        # Samples are read from the log file on demand.
        assert log.status == "success", log.error
        return str(log.samples[0].output.completion)


AGENTS: dict[str, Callable[[str], str]] = {
    "smolagents": with_smolagents,
    "langchain-openai": with_langchain,
    "pydantic-ai": with_pydantic_ai,
    "litellm": with_litellm,
    "inspect-ai": with_inspect,
}

if __name__ == "__main__":
    answer = AGENTS[sys.argv[1]](json.load(sys.stdin)["question"])
    sys.stdout.write("\n" + json.dumps({"answer": answer}) + "\n")
