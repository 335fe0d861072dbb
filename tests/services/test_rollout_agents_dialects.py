"""Anthropic's API, and OpenAI's Responses API as Codex uses it, by their bodies. `make test-agents` has the real clients."""

import json
from pathlib import Path
from typing import Any

import aiohttp

from rollbook.rollout.contract import ChatSession
from tests.parts.rollout.agents import agent_setup, assert_matches_engine, in_order

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call><|im_end|>'
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}


async def post(session: ChatSession, route: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{session.base_url}/{route}", json=body, headers=headers) as response,
    ):
        if response.content_type == "text/event-stream":
            lines = (await response.text()).splitlines()
            return response.status, [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        return response.status, await response.json()


def ask(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 200, "messages": list(messages), **more}


async def test_messages_with_system_blocks_tools_and_results_continue_the_exact_tokens(tmp_path: Path) -> None:
    replies = in_order("See." + CALL % ("get_weather", '{"city":"Paris"}'), "Sunny.<|im_end|>")
    async with agent_setup(tmp_path, replies) as (setup, record):
        async with setup.open_proxy_session() as session:
            system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Brief."}]
            common = {"system": system, "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}
            user = {"role": "user", "content": "Paris?"}
            _, counted = await post(session, "messages/count_tokens", {"messages": [user], **common})
            status, first = await post(session, "messages?beta=true", ask(user, **common))
            assert (status, first["stop_reason"]) == (200, "tool_use")
            text, use = first["content"]
            assert (text, use["input"]) == ({"type": "text", "text": "See."}, {"city": "Paris"})
            assert counted == {"input_tokens": first["usage"]["input_tokens"]}
            system[0] = {"type": "text", "text": "x-anthropic-billing-header: cch=2"}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "21 degrees"}
            more = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
            _, last = await post(session, "messages", ask(user, *more, **common))
            assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": "Sunny."}], "end_turn")
        sample = session.build(reward=1.0)
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)
    assert sample.facts["left_out"] == ["system: billing header", "tool web_search_20250305"]
    assert sample.messages is not None
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_stream_of_messages_has_the_blocks_of_the_whole_reply_and_reasoning_comes_back_unchanged(
    tmp_path: Path,
) -> None:
    thought = "<think>Which?</think>\n\nParis" + CALL % ("get_weather", "{}")
    opened_by_template = "Sure.</think> Yes<|im_end|>"
    async with agent_setup(tmp_path, in_order(thought, opened_by_template, "Bye.<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session:
            thinking: dict[str, Any] = {"thinking": {"type": "adaptive"}, "tools": [WEATHER], "stream": True}
            messages: list[Any] = [{"role": "user", "content": "Where?"}]
            found: list[list[dict[str, Any]]] = []
            for _ in range(3):
                _, events = await post(session, "messages", ask(*messages, **thinking))
                kinds = [event["type"] for event in events]
                assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
                found.append(blocks_of(events))
                uses = [block for block in found[-1] if block["type"] == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "ok"} for use in uses]
                messages += [
                    {"role": "assistant", "content": found[-1]},
                    {"role": "user", "content": results or "And?"},
                ]
        sample = session.build(reward=1.0)
    assert [[block["type"] for block in blocks] for blocks in found] == [
        ["thinking", "text", "tool_use"],
        ["thinking", "text"],
        ["text"],
    ]
    assert [found[0][0]["thinking"], found[0][1]["text"]] == ["Which?", "Paris"]
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)


def blocks_of(events: list[Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            if kind == "input_json":
                blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
            else:
                blocks[-1][kind] += event["delta"][kind]
    return blocks


async def test_errors_of_messages_have_their_form_and_name_the_field(tmp_path: Path) -> None:
    user = {"role": "user", "content": "x"}
    cases: list[tuple[Any, str]] = [
        ({"messages": [user]}, "max_tokens: a number of tokens is required"),
        (ask({"role": "tool", "content": "x"}), "messages[0]: a message is an object with the role"),
        (ask({"role": "user", "content": [{"type": "image"}]}), "messages[0].content[0]: blocks of type 'image'"),
        (ask(user, tool_choice={"type": "any"}), "tool_choice: 'required' requires tools"),
        (ask(user, stop_sequences=5), "stop_sequences: a string or a list"),
        (ask(user, system=5), "system: text or a list of blocks is required"),
    ]
    async with agent_setup(tmp_path, in_order()) as (setup, _), setup.open_proxy_session() as session:
        for body, message in cases:
            status, found = await post(session, "messages", body)
            assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
            assert found["error"]["message"].startswith(message)
        status, found = await post(session, "v1/messages", ask(user))
        assert (status, found["error"]["type"]) == (404, "not_found_error")
        assert "need the base URL without /v1" in found["error"]["message"]


FUNCTION = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
CODEX: dict[str, Any] = {
    "model": "policy",
    "store": False,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [
        FUNCTION,
        {"type": "namespace", "name": "team", "tools": [{**FUNCTION, "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation"},
    ],
}


async def test_responses_as_codex_sends_them_reach_the_policy_and_come_back_in_their_form(tmp_path: Path) -> None:
    replies = in_order(
        "Two." + (CALL % ("team__spawn", '{"message": "go"}')).removesuffix("<|im_end|>") + CALL % ("run", "{}"),
        CALL % ("apply_patch", '{"input": "*** Begin"}'),
        "Done.<|im_end|>",
    )
    async with agent_setup(tmp_path, replies) as (setup, record):
        async with setup.open_proxy_session() as session:
            items: list[Any] = [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Patch it."}]},
            ]
            for _ in range(3):
                status, events = await post(session, "responses", {**CODEX, "input": items, "stream": True})
                assert status == 200, events
                output = events[-1]["response"]["output"]
                done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
                assert done == output
                items += output
                items += [
                    {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
                    for item in output
                    if item["type"] != "message"
                ]
        sample = session.build(reward=1.0)
    spawn, patch = items[4], next(item for item in items if item["type"] == "custom_tool_call")
    assert (spawn["namespace"], spawn["name"], spawn["arguments"]) == ("team", "spawn", '{"message": "go"}')
    assert (patch["name"], patch["input"]) == ("apply_patch", "*** Begin")
    assert sample.facts["left_out"] == ["tool image_generation", "tool web_search"]
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)
    prompt = setup.tokenizer.decode(record.turns[0][0], skip_special_tokens=False)
    assert "You are Codex.\n\nNo network." in prompt
    assert '"team__spawn"' in prompt
    assert "web_search" not in prompt


async def test_a_setting_leaves_side_requests_out_of_training_and_they_stay_in_the_sample(tmp_path: Path) -> None:
    replies = in_order("A title<|im_end|>", "Sunny.<|im_end|>", "Still sunny.<|im_end|>")
    async with agent_setup(tmp_path, replies) as (setup, record):
        async with setup.open_proxy_session(train_only="agents") as session:
            await post(session, "messages", ask({"role": "user", "content": "Write a title"}))
            user = {"role": "user", "content": "Paris?"}
            _, first = await post(session, "messages", ask(user, tools=[WEATHER]))
            more = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And now?"}]
            await post(session, "messages", ask(user, *more, tools=[WEATHER]))
        sample = session.build(reward=1.0)
    assert_matches_engine(sample, record, untrained={0})
    assert sample.facts["lineage"] == [
        {"sequence": 0, "role": "side", "parent": 1, "agent": None, "left_out": 'side with train_only = "agents"'},
        {"sequence": 1, "role": "main", "parent": None, "agent": None},
    ]
    assert sample.messages is not None
    assert sample.messages[-1]["content"] == "Still sunny."
