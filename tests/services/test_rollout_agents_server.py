"""The agents' server with the real `openai` client: samples contain exactly the tokens that the engine consumed and produced."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.agents.session import ProxySession
from rollbook.rollout.contract import ChatSession
from rollbook.rollout.policy import EpisodeContext, EpisodeTimeUpError, enter_episode
from rollbook.rollout.settings import EpisodeLimits
from tests.parts.rollout.agents import (
    FORGETS_THINKING,
    THINKS_ON_REQUEST,
    agent_setup,
    assert_matches_engine,
    in_order,
)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = 'Let me see.<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call><|im_end|>'
"""Without the white space of the template: other tokens and text, the same meaning."""


def client_of(session: ChatSession, **more: Any) -> AsyncOpenAI:
    """Its default limit of 5 s for a connection is too short for a machine with more work than cores."""
    return AsyncOpenAI(base_url=session.base_url, api_key="unused", **{"max_retries": 0, "timeout": 60.0, **more})


async def ask(client: AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    return (await client.chat.completions.create(model="policy", messages=messages, **more)).choices[0]


async def test_a_chat_of_several_turns_is_one_sequence_with_the_exact_tokens_of_the_engine(tmp_path: Path) -> None:
    replies = in_order("It is sunny.<|im_end|>", "", "日本 is far.<|im_end|>")
    async with agent_setup(tmp_path, lambda prompt: replies(prompt) or "<|im_end|>") as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}]
            for question in ("What is the weather in Paris today?", "", "And in 東京?"):
                messages.append({"role": "user", "content": question})
                choice = await ask(client, messages)
                messages.append(choice.message.model_dump(exclude_none=True))
        sample = session.build(reward=1.0)
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["It is sunny.", "", "日本 is far."]
    assert len(sample.sequences) == 1
    assert_matches_engine(sample, record)
    assert sample.messages is not None
    assert [m["role"] for m in sample.messages] == ["system", *["user", "assistant"] * 3]


async def test_tool_calls_are_parsed_and_the_next_prompt_continues_their_exact_tokens(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order(CALL, "It is sunny.<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris today?"}]
            first = await ask(client, messages, tools=[WEATHER])
            assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
            call = first.message.tool_calls[0]
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
            messages += [
                first.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
            ]
            second = await ask(client, messages, tools=[WEATHER])
            assert second.message.content == "It is sunny."
        sample = session.build(reward=1.0)
    assert len(sample.sequences) == 1, sample.facts
    assert_matches_engine(sample, record)
    prompt = setup.tokenizer.decode(record.turns[1][0], skip_special_tokens=False)
    assert CALL in prompt, "the prompt contains the sampled text, not the template's rendering of it"
    assert "get_weather" in setup.tokenizer.decode(record.turns[0][0])


async def test_a_call_in_a_thought_is_no_call_of_the_agent(tmp_path: Path) -> None:
    thoughts = in_order(f"<think>{CALL.removesuffix('<|im_end|>')}</think>It is sunny.<|im_end|>")
    async with (
        agent_setup(tmp_path, thoughts) as (setup, _),
        setup.open_proxy_session() as session,
        client_of(session) as client,
    ):
        reply = await ask(client, [{"role": "user", "content": "What is the weather?"}], tools=[WEATHER])
    assert (reply.finish_reason, reply.message.tool_calls) == ("stop", None)
    assert reply.message.content.endswith("</think>It is sunny.")


async def test_a_history_rewritten_by_the_agent_starts_a_new_sequence(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order("one<|im_end|>", "two<|im_end|>", "three<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            await ask(client, [{"role": "user", "content": "a"}])
            edited = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "I said something else"},
                {"role": "user", "content": "b"},
            ]
            await ask(client, edited)
            # The first turn is still known, so its branch can be continued.
            first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]
            await ask(client, [*first, {"role": "user", "content": "c"}])
        sample = session.build(reward=0.5)
    assert [turn.sequence for turn in sample.turns] == [0, 1, 0]
    assert sample.metrics["forks"] == 1
    assert_matches_engine(sample, record)


async def play_two_thinking_turns(session: ChatSession) -> None:
    async with client_of(session) as client:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        choice = await ask(client, messages)
        messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "b"}]
        await ask(client, messages)


async def test_a_template_that_drops_thinking_starts_a_new_sequence_and_the_facts_say_where(tmp_path: Path) -> None:
    replies = in_order("hm</think>yes<|im_end|>", "ok</think>no<|im_end|>")
    async with agent_setup(tmp_path, replies, template=FORGETS_THINKING) as (setup, record):
        async with setup.open_proxy_session() as session:
            await play_two_thinking_turns(session)
        sample = session.build(reward=1.0)
    assert len(sample.sequences) == 2
    (rewrite,) = sample.facts["rewrites"]
    assert rewrite.startswith("before turn 2: at character ")
    assert "hm</think>" in rewrite
    assert_matches_engine(sample, record)


async def test_the_linear_assembler_refuses_a_rewritten_history_before_sampling(tmp_path: Path) -> None:
    replies = in_order("hm</think>yes<|im_end|>")
    async with agent_setup(tmp_path, replies, template=FORGETS_THINKING) as (setup, record):
        async with setup.open_proxy_session(assembler="linear") as session:
            with pytest.raises(openai.UnprocessableEntityError, match=r"does not start with the .* at position"):
                await play_two_thinking_turns(session)
        assert "at position" in str(session.failure)
        assert len(record.turns) == 1


async def test_per_turn_makes_every_turn_a_sequence(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order("a<|im_end|>", "b<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session(assembler="per_turn") as session:
            await play_two_thinking_turns(session)
        sample = session.build(reward=1.0)
    assert [turn.sequence for turn in sample.turns] == [0, 1]
    assert_matches_engine(sample, record)


FLAT_WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}


@pytest.mark.parametrize("is_chained", [False, True])
async def test_the_responses_api_continues_exact_tokens_by_items_and_by_previous_id(
    tmp_path: Path, is_chained: bool
) -> None:
    async with agent_setup(tmp_path, in_order(CALL, "It is sunny.<|im_end|>", "Bye.<|im_end|>", "42<|im_end|>")) as (
        setup,
        record,
    ):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]}]
            previous: str | None = None
            for _ in range(3):
                response = await client.responses.create(
                    model="policy",
                    instructions="Be brief.",
                    input=items,
                    tools=[FLAT_WEATHER],
                    previous_response_id=previous if previous else openai.omit,
                )
                if is_chained:
                    previous, items = response.id, []
                else:
                    items += [item.model_dump(exclude_none=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                items += [
                    {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"} for call in calls
                ]
                if not calls:
                    items.append({"role": "user", "content": "Thanks"})
            assert response.output_text == "Bye."
            assert response.usage is not None
            assert response.usage.output_tokens == len("Bye.") + 1
            scored = await client.responses.create(model="policy", input="x", include=["message.output_text.logprobs"])
            assert scored.output[0].type == "message"
            assert scored.output[0].content[0].type == "output_text"
            entries = scored.output[0].content[0].logprobs
            assert entries is not None
            assert [(entry.token, entry.top_logprobs) for entry in entries] == [
                ("4", []),
                ("2", []),
                ("<|im_end|>", []),
            ]
            with pytest.raises(openai.BadRequestError, match="include: a list is required"):
                await client.responses.create(model="policy", input="x", extra_body={"include": 5})
            with pytest.raises(openai.BadRequestError, match="top_logprobs: 99 is not"):
                await client.responses.create(model="policy", input="x", top_logprobs=99)
            with pytest.raises(openai.NotFoundError, match="POST /v1/completions is not served here"):
                await client.completions.create(model="policy", prompt="x")
            assert (await client.models.retrieve("policy")).id == "policy"
        sample = session.build(reward=1.0)
    # The last request is a separate conversation.
    assert [turn.sequence for turn in sample.turns] == [0, 0, 0, 1], sample.facts
    assert_matches_engine(sample, record)


async def test_streams_have_the_content_of_whole_responses(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order(CALL, "Sun.<|im_end|>", CALL, "Rain.<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            async with client.chat.completions.stream(
                model="policy", messages=[{"role": "user", "content": "Paris?"}], tools=[WEATHER]
            ) as chunks:
                final = (await chunks.get_final_completion()).choices[0]
            assert final.message.tool_calls is not None
            assert final.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
            texts = [
                chunk.choices[0].delta.content
                async for chunk in await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "x"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
                if chunk.choices
            ]
            assert "".join(text or "" for text in texts) == "Sun."
            async with client.responses.stream(model="policy", input="Paris?", tools=[FLAT_WEATHER]) as events:
                response = await events.get_final_response()
            assert [item.type for item in response.output] == ["message", "function_call"]
            async with client.responses.stream(model="policy", input="Paris?") as events:
                assert (await events.get_final_response()).output_text == "Rain."
        assert_matches_engine(session.build(reward=1.0), record)


async def test_a_stream_has_the_text_around_a_call_and_the_next_prompt_continues_its_tokens(tmp_path: Path) -> None:
    """The parser removes the white space before the text, which was sent already."""
    reply = f"\n\n{CALL.removesuffix('<|im_end|>')} One moment.<|im_end|>"
    async with agent_setup(tmp_path, in_order(reply, "Sun.<|im_end|>", reply)) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: list[Any] = [{"role": "user", "content": "Paris?"}]
            async with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as chunks:
                said = (await chunks.get_final_completion()).choices[0].message
            assert said.content == "\n\nLet me see. One moment."
            assert said.tool_calls is not None
            calls = [call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls]
            messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "21 degrees"})
            await ask(client, messages, tools=[WEATHER])
            texts = [
                event.delta
                async for event in await client.responses.create(
                    model="policy", input="Oslo?", tools=[FLAT_WEATHER], stream=True
                )
                if event.type == "response.output_text.delta"
            ]
            assert "".join(texts) == "\n\nLet me see. One moment."
        sample = session.build(reward=1.0)
    assert [turn.sequence for turn in sample.turns] == [0, 0, 1]
    assert_matches_engine(sample, record)


async def test_instructions_must_be_a_text_and_an_empty_one_is_no_message(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order("one<|im_end|>", "two<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            with pytest.raises(openai.BadRequestError, match="instructions: a string is required"):
                await client.responses.create(
                    model="policy", input="a", extra_body={"instructions": [{"role": "system", "content": "Hi"}]}
                )
            first = await client.responses.create(model="policy", input="a", instructions="")
            await client.responses.create(model="policy", input="b", instructions="", previous_response_id=first.id)
        sample = session.build(reward=1.0)
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert len(sample.sequences) == 1
    assert_matches_engine(sample, record)


class StepClock(SystemClock):
    """The engine takes a step for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        await self._permits.acquire()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.release()


async def test_a_stream_sends_each_token_with_its_logprob_while_the_turn_is_sampled(tmp_path: Path) -> None:
    clock = StepClock()
    async with agent_setup(tmp_path, lambda _: "Let us. <|im_end|>", clock=clock) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            clock.allow(2)
            stream: Any = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "x"}],
                tools=[WEATHER],
                stream=True,
                logprobs=True,
                top_logprobs=1,
            )
            chunks = [(await anext(stream)).choices[0] for _ in range(3)]
            assert session.num_turns == 0, "the whole turn was sampled before the first chunk was sent"
            clock.allow(100)
            chunks += [chunk.choices[0] async for chunk in stream]
        assert [c.delta.content for c in chunks if c.delta.content] == ["L", "e", "t", " u", "s", ".", " "]
        entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
        assert [entry.token for entry in entries] == [*"Let us. ", "<|im_end|>"]
        assert [entry.top_logprobs[0].token for entry in entries] == [entry.token for entry in entries]
        assert chunks[-1].finish_reason == "stop"
        assert_matches_engine(session.build(reward=1.0), record)


async def test_events_of_the_responses_api_are_sent_while_the_turn_is_sampled(tmp_path: Path) -> None:
    clock = StepClock()
    async with agent_setup(tmp_path, lambda _: CALL, clock=clock) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            clock.allow(3)
            stream: Any = await client.responses.create(
                model="policy",
                input="x",
                tools=[FLAT_WEATHER],
                stream=True,
                include=["message.output_text.logprobs"],
                top_logprobs=1,
            )
            events = [await anext(stream)]
            while sum(event.type == "response.output_text.delta" for event in events) < 3:
                events.append(await anext(stream))
            assert session.num_turns == 0, "the whole turn was sampled before the first event was sent"
            clock.allow(200)
            events += [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        # The logprobs of the call and of the end token come last, with an empty text.
        assert deltas == ["L", "e", "t", " m", "e", " s", "e", "e", ".", ""]
        entries = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert "".join(entry.token for entry in entries) == CALL
        assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
        [done] = [event for event in events if event.type == "response.output_text.done"]
        [message, _] = events[-1].response.output
        expected = [entry.logprob for entry in entries]
        for whole in (done.logprobs, message.content[0].logprobs):
            assert [entry.logprob for entry in whole] == expected
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
        assert_matches_engine(session.build(reward=1.0), record)


async def test_arguments_of_a_request_reach_the_chat_template_and_unsupported_fields_are_refused(
    tmp_path: Path,
) -> None:
    async with agent_setup(tmp_path, lambda _: "ok<|im_end|>", template=THINKS_ON_REQUEST) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: Any = [{"role": "user", "content": "x"}]
            thinks = {"chat_template_kwargs": {"enable_thinking": True}}
            await ask(client, messages, extra_body=thinks)
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "y"}]
            await ask(client, messages, extra_body=thinks)
            cut: Any = await client.responses.create(model="policy", input="z", max_output_tokens=1, extra_body=thinks)
            assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
            for name, value in (("repetition_penalty", 1.2), ("stop_token_ids", [3]), ("chat_template_kwargs", "x")):
                with pytest.raises(openai.BadRequestError, match=name):
                    await ask(client, messages, extra_body={name: value})
        sample = session.build(reward=1.0)
    prompts = [setup.tokenizer.decode(prompt, skip_special_tokens=False) for prompt, _ in record.turns]
    assert prompts[0].startswith("Think.")
    assert prompts[1].startswith(f"{prompts[0]}ok<|im_end|>")
    assert prompts[2].startswith("Think.")
    assert [turn.sequence for turn in sample.turns] == [0, 0, 1], sample.facts
    assert_matches_engine(sample, record)


async def test_a_turn_ends_with_the_tokens_so_far_if_the_agent_stops_reading_its_stream(tmp_path: Path) -> None:
    clock = StepClock()
    async with agent_setup(tmp_path, lambda _: "Let us.<|im_end|>", clock=clock) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            clock.allow(2)
            messages: Any = [{"role": "user", "content": "x"}]
            stream: Any = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            await anext(stream)
            await stream.close()
            await session.settled()
        sample = session.build(reward=1.0)
        assert_matches_engine(sample, record)
        assert sample.num_trained == 2
        assert session.last_text == "Le"


async def test_an_error_before_the_first_token_of_a_stream_has_its_status_and_a_later_one_is_an_event(
    tmp_path: Path,
) -> None:
    clock = StepClock()
    async with (
        agent_setup(tmp_path, lambda _: "Let us.<|im_end|>", clock=clock) as (setup, _),
        setup.open_proxy_session() as session,
        client_of(session) as client,
    ):
        messages: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.chat.completions.create(model="policy", messages=messages, stream=True, logit_bias={"1": 2})
        clock.allow(2)
        stream: Any = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        await anext(stream)
        assert isinstance(session, ProxySession)
        session.close()
        clock.allow(100)
        with pytest.raises(openai.APIError, match="closed during the policy request"):
            [chunk async for chunk in stream]


async def test_a_session_is_named_by_url_header_or_api_key_and_an_unknown_one_is_refused(
    tmp_path: Path,
) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>") as (setup, record):
        async with setup.open_proxy_session() as session:
            root = session.base_url.replace(f"/s/{session.id}", "")
            clients = [
                AsyncOpenAI(base_url=session.base_url, api_key="x"),
                AsyncOpenAI(base_url=root, api_key=session.id),
                AsyncOpenAI(base_url=root, api_key="x", default_headers={"X-Rollbook-Session": session.id}),
            ]
            for client in clients:
                async with client:
                    assert [model.id async for model in await client.models.list()] == ["policy"]
                    assert (await ask(client, [{"role": "user", "content": "hi"}])).message.content == "yes"
            with pytest.raises(openai.NotFoundError, match="no episode 'unknown'"):
                async with AsyncOpenAI(base_url=root, api_key="unknown") as other:
                    await ask(other, [{"role": "user", "content": "hi"}])
        assert_matches_engine(session.build(reward=1.0), record)
        async with client_of(session) as late:
            with pytest.raises(openai.NotFoundError, match="it is over"):
                await ask(late, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "n: 2 is not supported"),
        ({"tool_choice": "required"}, "requires tools"),
        ({"response_format": {"type": "yaml"}}, "response_format: the type must be"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21 is not a number from 0 to 20"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens: -1 is not a positive number"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: 0 is not a positive number"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\]: .* one of system"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]: .* one of system"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, r"messages\[0\]\.tool_calls: a list is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            r"messages\[0\]\.content: only text is supported, not 'image_url'",
        ),
        ({"messages": []}, "at least one"),
    ],
)
async def test_an_unsupported_request_is_refused_and_the_episode_continues(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>") as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            with pytest.raises(openai.BadRequestError, match=message):
                await ask(client, **{"messages": [{"role": "user", "content": "hi"}], **more})
            assert record.turns == []
            await ask(client, [{"role": "user", "content": "hi"}])
            assert session.failure is None
        assert_matches_engine(session.build(reward=1.0), record)


async def test_the_run_overrides_sampling_fields_and_the_sample_lists_them(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>") as (setup, _record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            await ask(client, [{"role": "user", "content": "hi"}], temperature=0.2, seed=1)
        sample = session.build(reward=1.0)
    assert sample.sampling.temperature == 1.0
    assert sample.facts["overridden_sampling"] == ["seed", "temperature"]


FORCED_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'


async def test_a_forced_call_and_a_response_format_follow_their_grammar_and_are_marked(tmp_path: Path) -> None:
    replies = in_order("well<|im_end|>", FORCED_CALL, '{"is_warm": true}<|im_end|>')
    schema: Any = {"type": "object", "properties": {"is_warm": {"type": "boolean"}}, "required": ["is_warm"]}
    async with agent_setup(tmp_path, replies) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            history: list[Any] = [{"role": "user", "content": "hi"}]
            await ask(client, history)
            forced = await ask(client, history, tools=[WEATHER], tool_choice="required")
            (call,) = forced.message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
            response = await client.responses.create(model="policy", input="warm?", text=form)
            assert json.loads(response.output_text) == {"is_warm": True}
        sample = session.build(reward=1.0)
        assert_matches_engine(sample, record)
    assert sample.facts["constrained_turns"] == [2, 3]


async def test_a_policy_that_leaves_the_grammar_fails_the_request(tmp_path: Path) -> None:
    """The scripted engine cannot choose another token, so it refuses. A real engine samples among the allowed ones."""
    async with (
        agent_setup(tmp_path, lambda _: "no<|im_end|>") as (setup, _),
        setup.open_proxy_session() as session,
        client_of(session) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="which the grammar excludes"):
            await ask(client, [{"role": "user", "content": "hi"}], tools=[WEATHER], tool_choice="required")


async def test_logprobs_have_text_bytes_and_alternatives_whole_and_streamed(tmp_path: Path) -> None:
    async with (
        agent_setup(tmp_path, lambda _: "yes<|im_end|>") as (setup, _),
        setup.open_proxy_session() as session,
        client_of(session) as client,
    ):
        body: Any = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
        entries = (await ask(client, **body)).logprobs.content
        assert [entry.token for entry in entries] == ["y", "e", "s", "<|im_end|>"]
        assert bytes(entries[0].bytes) == b"y"
        # A script has one possible token, so the other of the two likeliest is left out.
        assert [[top.token for top in entry.top_logprobs] for entry in entries] == [[e.token] for e in entries]
        streamed = [
            entry
            async for chunk in await client.chat.completions.create(model="policy", stream=True, **body)
            if chunk.choices and chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
        assert streamed == entries


async def test_a_stop_text_ends_the_turn_at_the_token_that_completes_it(tmp_path: Path) -> None:
    replies = in_order("Thought: go\nObservation: I imagine it<|im_end|>", "done<|im_end|>")
    async with agent_setup(tmp_path, replies) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            first = await ask(client, messages, stop=["Observation:"])
            assert (first.message.content, first.finish_reason) == ("Thought: go\n", "stop")
            messages += [{"role": "assistant", "content": first.message.content}, {"role": "user", "content": "real"}]
            await ask(client, messages)
        sample = session.build(reward=1.0)
    assert len(sample.sequences) == 1, sample.facts
    row, turn = sample.sequences[0], sample.turns[0]
    assert setup.tokenizer.decode(row.token_ids[turn.start : turn.end].tolist()) == "Thought: go\nObservation:"
    assert_matches_engine(sample, record)


async def test_a_turn_cut_by_max_tokens_continues_from_its_exact_tokens(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order("abcdef<|im_end|>", "yes<|im_end|>")) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            first = await ask(client, messages, max_tokens=3)
            assert (first.message.content, first.finish_reason) == ("abc", "length")
            messages += [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "go on"}]
            await ask(client, messages)
        sample = session.build(reward=1.0)
    assert len(sample.sequences) == 1
    assert sample.metrics["cut_turns"] == 1
    assert sample.finish_reason is EndReason.DONE, "only the last answer counts"
    assert_matches_engine(sample, record)


async def test_an_episode_whose_last_turn_is_cut_is_truncated(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order("abcdef<|im_end|>")) as (setup, _):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            await ask(client, [{"role": "user", "content": "hi"}], max_tokens=3)
        assert session.build(reward=1.0).finish_reason is EndReason.MAX_TOKENS


async def test_a_limit_is_an_outcome_that_clients_do_not_retry(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", limits=EpisodeLimits(max_turns=1)) as (setup, record):
        async with setup.open_proxy_session() as session:
            async with AsyncOpenAI(base_url=session.base_url, api_key="x", max_retries=5) as client:
                await ask(client, [{"role": "user", "content": "hi"}])
                with pytest.raises(openai.APIStatusError, match="this episode is over: max_turns") as refused:
                    await ask(client, [{"role": "user", "content": "hi again"}])
                assert refused.value.status_code == 410
            assert session.end_reason is EndReason.MAX_TURNS
            assert session.failure is None
        sample = session.build(reward=0.0)
    assert sample.finish_reason is EndReason.MAX_TURNS
    assert_matches_engine(sample, record)


async def test_concurrent_requests_become_branches_and_respect_the_turn_limit(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", limits=EpisodeLimits(max_turns=3)) as (setup, record):
        async with setup.open_proxy_session() as session, client_of(session) as client:
            requests = [ask(client, [{"role": "user", "content": f"question {n}"}]) for n in range(5)]
            results = await asyncio.gather(*requests, return_exceptions=True)
        refused = [result for result in results if isinstance(result, openai.APIStatusError)]
        assert [error.status_code for error in refused] == [410, 410], results
        sample = session.build(reward=1.0)
    assert len(sample.turns) == len(sample.sequences) == 3
    trained = {tuple(row.token_ids.tolist()) for row in sample.sequences}
    assert trained == {tuple(consumed + produced) for consumed, produced in record.turns}


async def test_weights_older_than_the_admission_do_not_sample_and_the_session_keeps_the_error(
    tmp_path: Path,
) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>", publication=3) as (setup, record):
        enter_episode(EpisodeContext(group_id=GroupId("t@0"), min_publication=4, until=time.monotonic() + 4))
        async with setup.open_proxy_session() as session, client_of(session) as client:
            with pytest.raises(openai.APIStatusError, match="publication 4 or newer") as refused:
                await ask(client, [{"role": "user", "content": "hi"}])
            assert refused.value.status_code == 503
            assert isinstance(session.failure, TransientError)
        assert record.turns == []


async def test_a_first_turn_that_takes_all_the_time_keeps_its_class_of_failure(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, lambda _: "yes<|im_end|>") as (setup, _):
        enter_episode(EpisodeContext(group_id=GroupId("t@0"), min_publication=0, until=time.monotonic() - 1))
        async with setup.open_proxy_session() as session, client_of(session) as client:
            with pytest.raises(openai.APIStatusError, match="the time of this episode is over"):
                await ask(client, [{"role": "user", "content": "hi"}])
            assert isinstance(session.failure, EpisodeTimeUpError)


async def test_conversations_of_one_session_have_their_own_sequences_and_limits(tmp_path: Path) -> None:
    def policy(prompt: str) -> str:
        return "Again.<|im_end|>" if "More" in prompt else "Sunny.<|im_end|>"

    limits = EpisodeLimits(max_turns=2, max_total_tokens=120, max_seconds=60)
    async with (
        agent_setup(tmp_path, policy, limits=limits) as (setup, record),
        setup.open_proxy_session(has_conversations=True) as session,
    ):
        samples = []
        for name in ("a", "b"):
            async with client_of(session, default_headers={"X-Session-ID": name}) as client:
                messages: list[Any] = [{"role": "user", "content": "Paris?"}]
                messages.append((await ask(client, messages)).message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "More" if name == "a" else f"More {'weather ' * 300}"})
                if name == "a":
                    assert (await ask(client, messages)).message.content == "Again."
                else:
                    # As at the end of a model's context: harnesses end on it, and what they did is scored.
                    with pytest.raises(openai.BadRequestError) as caught:
                        await ask(client, messages)
                    assert "context_length_exceeded" in str(caught.value.body)
                    assert "maximum context length" in str(caught.value)
            assert session.conversations is not None
            samples.append(session.conversations[name].build(reward=1.0))
    assert [len(sample.turns) for sample in samples] == [2, 1]
    assert [len(sample.sequences) for sample in samples] == [1, 1]
    assert [sample.finish_reason for sample in samples] == [EndReason.DONE, EndReason.MAX_TOKENS]
    assert len(record.turns) == 3
    for sample in samples:
        for turn in sample.turns:
            tokens = sample.sequences[0].token_ids.tolist()
            assert (tokens[: turn.start], tokens[turn.start : turn.end]) in record.turns
