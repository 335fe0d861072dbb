"""The official openai client against the policy server, in a thread of this process: tools and required formats."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from rollbook.commands.servers.policy import adopt_directory_weights
from rollbook.concurrency.blocking import LoopThread
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.rollout.chat.tokenizer import ModelTokenizer

ANSWER: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "is_warm": {"type": "boolean"}},
    "required": ["city", "is_warm"],
    "additionalProperties": False,
}


PICK: Any = {"type": "function", "function": {"name": "pick", "parameters": ANSWER}}


TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "…", "parameters": {"type": "object", "properties": {}}},
}


@asynccontextmanager
async def policy_server(model_dir: Path, tokenizer: ModelTokenizer) -> AsyncIterator[str]:
    config = InferenceConfig(engine="transformers")
    async with open_engine(config, model_dir) as engine:
        await adopt_directory_weights(engine)
        async with serve(build_app(engine, config, tokenizer=tokenizer, model_names=("tiny",))) as url:
            yield url


@pytest.fixture(scope="module")
def client(model_dir: Path, tokenizer: ModelTokenizer) -> Iterator[openai.OpenAI]:
    with LoopThread("policy server") as thread:
        url = thread.enter(policy_server(model_dir, tokenizer))
        with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
            yield client


def test_a_response_format_forces_json_of_its_schema(client: openai.OpenAI) -> None:
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "where?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
        "logprobs": True,
        "n": 4,
        "seed": 2,
    }
    whole = client.chat.completions.create(**body)
    for choice in whole.choices:
        assert choice.message.content is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        answer = json.loads(choice.message.content)
        assert answer["city"] in ("Paris", "Oslo")
        assert isinstance(answer["is_warm"], bool)
        assert choice.finish_reason == "stop"
        # The only allowed token has probability 1.
        assert choice.logprobs.content[0].logprob == pytest.approx(0.0, abs=1e-6)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**{**body, "n": 1}, stream=True)
    )
    assert streamed == whole.choices[0].message.content


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_tool_choice_gives_a_call_with_valid_arguments(client: openai.OpenAI, tool_choice: Any) -> None:
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "where?"}],
        "tools": [PICK] if tool_choice == "required" else [TOOL, PICK],
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
    }
    choice = client.chat.completions.create(**body, max_tokens=200).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_the_openai_client_parses_structured_output_into_a_model(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        is_warm: bool

    parsed = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "?"}], response_format=Answer, max_tokens=64
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"choice": ["red", "green"]}, {"red", "green"}),
        ({"regex": "(red|green)"}, {"red", "green"}),
        ({"regex": "red/green"}, {"red/green"}),
        ({"regex": r"red\/green"}, {"red/green"}),
    ],
)
def test_structured_outputs_of_completions_have_the_names_of_vllm(
    client: openai.OpenAI, form: Any, expected: set[str]
) -> None:
    reply = client.completions.create(
        model="tiny", prompt="a colour: ", max_tokens=20, n=4, extra_body={"structured_outputs": form}
    )
    assert {choice.text for choice in reply.choices} <= expected


def test_tools_reach_the_prompt_through_the_template(client: openai.OpenAI, tokenizer: ModelTokenizer) -> None:
    messages: Any = [
        {"role": "user", "content": "who?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}],
        },
        {"role": "tool", "content": "nobody", "tool_call_id": "1"},
    ]
    reply: Any = client.chat.completions.create(
        model="tiny", messages=messages, tools=[TOOL], max_tokens=3, extra_body={"return_token_ids": True}
    )
    prompt = tokenizer.decode(reply.prompt_token_ids)
    assert prompt.startswith("<tools>" + json.dumps([TOOL], ensure_ascii=False))
    assert '[look_up {"q": 1}]' in prompt
    assert "<tool>nobody" in prompt
