"""The rollout function for tools: plain functions are described, called and answered, and mistakes of the policy are results."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.output_formats import ToolCall
from rollbook.contracts.plugin import PluginError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.tool_calls import ParsedText
from rollbook.rollout.episodes.tools import load_tool, make_rollout
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from tests.parts.rollout.guessing import completion, letter_tokenizer, setup_of


def add(left: int, right: int = 1) -> int:
    """The sum of two numbers."""
    return left + right


async def city_of(
    row: Mapping[str, Any], *, kind: Annotated[Literal["big", "small"], Field(description="size")]
) -> str:
    return f"{row['city']} {kind}"


def fails(left: int) -> int:
    return left // 0


def breaks(left: int) -> int:
    raise EpisodeError("the search service is down")


async def sleeps(left: int) -> int:
    await asyncio.sleep(3600)
    return left


MEETING = threading.Barrier(4, timeout=60)


def meets(left: int) -> int:
    """Returns when four calls are in progress."""
    MEETING.wait()
    return left


def anything(*parts: int) -> int:
    return sum(parts)


def parse(text: str) -> ParsedText:
    """`call add 2 3; call add 4` in place of a model's format: the tokenizer of these tests has no braces."""
    calls = []
    for part in text.split(";"):
        word, _, rest = part.strip().partition(" ")
        if word == "call":
            name, *numbers = rest.split()
            arguments = dict(zip(("left", "right", "other"), map(int, numbers), strict=False))
            calls.append(ToolCall(name, json.dumps(arguments)))
    return ParsedText("" if calls else text, tuple(calls))


class Answers:
    """A policy that says these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._tokenizer = letter_tokenizer()
        self._texts = list(texts)

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        return completion(self._tokenizer.encode(self._texts.pop(0).replace(";", "\n") + "<|im_end|>"))


def lines(text: str) -> ParsedText:
    return parse(text.replace("\n", ";"))


async def played(*texts: str, row: Mapping[str, Any] | None = None, **settings: Any) -> RolloutSample:
    names = ["add", "fails", "breaks", "sleeps", "meets"]
    setup, _ = setup_of(
        settings={
            "tools": [f"{__name__}:{name}" for name in names],
            "tool_parser": f"{__name__}:lines",
            **settings,
        },
        limits=EpisodeLimits(max_turns=3),
    )
    sampling = SamplingParams(max_tokens=64)
    policy = EpisodePolicy(Answers(texts), sampling)
    play = make_rollout(replace(setup, policy=policy, sampling=sampling))
    sample = await play(dict(row or {"question": "what is 2 and 3?"}))
    assert sample is not None
    return sample


def results(sample: RolloutSample) -> list[str]:
    assert sample.facts is not None
    return [call["result"] for call in sample.facts["tool_calls"]]


async def test_the_policy_calls_tools_until_it_answers() -> None:
    sample = await played("call add 2 3; call add 4", "5")
    assert results(sample) == ["5", "5"]
    assert [message["role"] for message in sample.messages or ()] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (sample.finish_reason, len(sample.turns), sample.metrics["tool_calls"]) == (EndReason.DONE, 2, 2.0)
    assert sample.reward is None


async def test_a_limit_ends_an_episode_that_never_answers() -> None:
    sample = await played(*["call add 1 1"] * 3)
    assert sample.finish_reason is EndReason.MAX_TURNS


async def test_mistakes_of_the_policy_are_results_it_can_read() -> None:
    sample = await played("call sing 1; call add; call add 1 2 3; call fails 1; call sleeps 1", "5", tool_timeout_s=0.2)
    unknown, missing, extra, failed, slow = results(sample)
    assert "there is no tool 'sing'; the tools are add, " in unknown
    assert missing == "add was not called: left: Field required"
    assert "other: Extra inputs are not permitted" in extra
    assert "fails raised ZeroDivisionError" in failed
    assert slow == "sleeps did not return within 0.2 seconds"


async def test_a_tool_that_fails_itself_makes_the_episode_unscorable() -> None:
    with pytest.raises(EpisodeError, match="the search service is down"):
        await played("call breaks 1", "5")


async def test_calls_of_one_turn_run_at_the_same_time() -> None:
    assert results(await played("; ".join(["call meets 1"] * 4), "1")) == ["1"] * 4


async def test_a_task_may_bring_its_own_messages_and_must_bring_something() -> None:
    sample = await played("5", row={"messages": [{"role": "user", "content": "hi"}]}, system_prompt="count")
    assert [message["content"] for message in sample.messages or ()] == ["count", "hi", "5"]
    with pytest.raises(RunError, match=r"needs `question` or `messages`; this one has \['text'\]"):
        await played("5", row={"text": "hi"})


def test_the_signature_and_the_docstring_describe_a_tool() -> None:
    assert load_tool(f"{__name__}:add").description == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"type": "integer"}, "right": {"type": "integer", "default": 1}},
                "required": ["left"],
                "additionalProperties": False,
            },
        },
    }
    described = load_tool(f"{__name__}:city_of").description["function"]["parameters"]
    assert described["properties"] == {"kind": {"description": "size", "enum": ["big", "small"], "type": "string"}}


async def test_the_task_reaches_a_parameter_that_the_policy_does_not_see() -> None:
    tool = load_tool(f"{__name__}:city_of")
    assert await tool.call('{"kind": "big"}', {"city": "Oslo"}, timeout_s=5) == "Oslo big"
    assert "was not called" in await tool.call('{"kind": "big", "row": {}}', {"city": "Oslo"}, timeout_s=5)
    assert "was not called" in await tool.call("not JSON", {"city": "Oslo"}, timeout_s=5)


def test_a_function_without_named_parameters_cannot_be_a_tool() -> None:
    with pytest.raises(PluginError, match=r"whose parameter \*parts: int has no name of its own"):
        load_tool(f"{__name__}:anything")
