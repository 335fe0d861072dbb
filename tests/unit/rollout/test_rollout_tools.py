"""The rollout function for tools: plain functions are described, called and answered, and mistakes of the policy are results."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.output_formats import ToolCall
from rollbook.contracts.plugin import PluginError
from rollbook.contracts.policy import NOT_SAMPLED, Completion, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.tool_calls import ParsedText
from rollbook.rollout.episodes.tools import load_tool, make_rollout
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from tests.parts.rollout.family_templates import STYLES
from tests.parts.rollout.guessing import CHATML, completion, letter_tokenizer, setup_of


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


def surrogate(left: int) -> str:
    return "\ud800" * left


def huge(left: int) -> dict[str, int]:
    """No number that JSON or text can hold."""
    return {"value": 10**10_000}


class Unprintable:
    def __str__(self) -> str:
        raise KeyError("name")


def unprintable(left: int) -> Unprintable:
    return Unprintable()


async def exits(left: int) -> int:
    sys.exit(f"code {left}")


def times_out(left: int) -> int:
    raise TimeoutError("the upstream server did not answer")


MEETING = threading.Barrier(4, timeout=60)


def meets(left: int) -> int:
    """Returns when four calls are in progress."""
    MEETING.wait()
    return left


QWEN_ADD = "<tool_call><function=add><parameter=left>2</parameter><parameter=right>3</parameter></function></tool_call>"


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


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("<think>\n", f"no</think>{QWEN_ADD}"),
        ("", f"<think>{QWEN_ADD}</think>{QWEN_ADD}"),
        ("[T]", f"no[/T]{QWEN_ADD}"),
    ],
)
async def test_a_call_after_a_thought_is_executed_with_the_types_of_the_tool_and_none_in_a_thought_is(
    prompt: str, said: str
) -> None:
    style = STYLES[0]
    tokenizer = replace(
        style, template=style.template.replace("assistant\n{% endif", f"assistant\n{prompt}{{% endif")
    ).tokenizer()
    texts = [said, f"{said.partition('/')[0]} {QWEN_ADD}"]

    class Says:
        async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
            return completion(tokenizer.encode(f"{texts.pop(0)}<|im_end|>"))

    tags = ("[T]", "[/T]") if prompt == "[T]" else ("<think>", "</think>")
    setup, _ = setup_of(
        settings={"tools": [f"{__name__}:add"], "tool_parser": "qwen", "thinking_tags": tags},
        limits=EpisodeLimits(max_turns=3, max_total_tokens=4096),
    )
    sampling = SamplingParams(max_tokens=999)
    play = make_rollout(replace(setup, tokenizer=tokenizer, policy=EpisodePolicy(Says(), sampling), sampling=sampling))
    sample = await play({"question": "what is 2 and 3?"})
    assert sample is not None
    assert results(sample) == ["5"], "the second turn ends in its thought"


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


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (surrogate, r"\ud800"),
        (huge, "huge raised ValueError: Exceeds the limit"),
        (unprintable, "unprintable raised KeyError: 'name'"),
        (exits, "exits raised RuntimeError: SystemExit: code 1"),
        (times_out, "times_out raised TimeoutError: the upstream server did not answer"),
    ],
)
async def test_what_a_tool_returns_or_raises_is_a_result_that_can_be_recorded(
    tool: Callable[[int], Any], expected: str
) -> None:
    found = load_tool(f"{__name__}:{tool.__name__}")
    result = await found.call('{"left": 1}', {}, timeout_s=60)
    assert result.startswith(expected)
    result.encode()


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


async def test_examples_are_between_the_system_message_and_the_question_and_are_not_trained() -> None:
    examples = [{"role": "user", "content": "what is 1 and 1?"}, {"role": "assistant", "content": "call add 1 1"}]
    sample = await played("5", system_prompt="count", examples=examples)
    contents = [message["content"] for message in sample.messages or ()]
    assert contents == ["count", "what is 1 and 1?", "call add 1 1", "what is 2 and 3?", "5"]
    assert int(np.sum(sample.loss_mask)) == len(letter_tokenizer().encode("5<|im_end|>"))
    with pytest.raises(RunError, match="each message needs role and content"):
        await played("5", examples=[{"role": "user"}])


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


THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


class Script:
    """A policy that says a text in each turn, as far as `max_tokens` allows, and continues it in the next request."""

    def __init__(self, *turns: str) -> None:
        self.tokenizer = letter_tokenizer()
        self._turns = [self.tokenizer.encode(f"{text}<|im_end|>") for text in turns]
        self._answer = self.tokenizer.encode("5<|im_end|>")
        self.requests: list[tuple[list[int], list[int]]] = []

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        prompt = list(prompt_ids)
        rest = self._answer if self.requests and self._is_ended(prompt) else self._turns[0]
        said, left = rest[: sampling.max_tokens], rest[sampling.max_tokens :]
        self.requests.append((prompt, said))
        self._turns[0] = left
        if not left:
            self._turns.pop(0)
        return completion(said, version=len(self.requests), is_truncated=bool(left))

    def _is_ended(self, prompt: Sequence[int]) -> bool:
        return self.tokenizer.decode(list(prompt)).endswith("\n</think>\n\n")


async def thought(
    text: str, budget: int | None, *, template: str = CHATML, max_tokens: int = 64
) -> tuple[RolloutSample, Script]:
    script = Script(text)
    setup, _ = setup_of(
        settings={
            "tools": [f"{__name__}:add"],
            "tool_parser": f"{__name__}:lines",
            **({} if budget is None else {"max_thinking_tokens": budget}),
        },
        template=template,
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    play = make_rollout(replace(setup, policy=EpisodePolicy(script, sampling), sampling=sampling))
    sample = await play({"question": "what is 2 and 3?"})
    assert sample is not None
    return sample, script


def require_exact_tokens(sample: RolloutSample, script: Script) -> None:
    """The tokens are those that the policy read and sampled, and exactly the sampled ones are trained."""
    (row,) = sample.sequences
    sampled = np.zeros(len(row.token_ids), dtype=bool)
    for number, (prompt, said) in enumerate(script.requests, start=1):
        assert row.token_ids[: len(prompt) + len(said)].tolist() == [*prompt, *said]
        place = slice(len(prompt), len(prompt) + len(said))
        sampled[place] = True
        assert set(row.versions[place].tolist()) == {number}
    np.testing.assert_array_equal(row.loss_mask, sampled)
    np.testing.assert_array_equal(row.logprobs, np.where(sampled, np.float32(-0.5), np.float32(0.0)))
    assert set(row.versions[~sampled].tolist()) == {NOT_SAMPLED}
    assert sample.metrics["thought_tokens"] + sample.metrics["answer_tokens"] == sample.num_trained


@pytest.mark.parametrize(("template", "opening"), [(CHATML, "<think>\n"), (THINKING, "")])
async def test_a_thought_beyond_its_budget_is_ended_and_the_policy_answers(template: str, opening: str) -> None:
    sample, script = await thought(opening + "a" * 99, 20, template=template)
    require_exact_tokens(sample, script)
    assert len(script.requests) == 2
    said = (opening + "a" * 99)[:20] + "\n</think>\n\n5"
    assert sample.messages is not None
    assert sample.messages[-1]["content"] == said
    assert len(sample.turns) == 1
    assert (sample.metrics["thought_tokens"], sample.metrics["answer_tokens"]) == (20.0, 2.0)
    assert sample.metrics["ended_thoughts"] == 1.0
    assert sample.finish_reason is EndReason.DONE


@pytest.mark.parametrize("budget", [None, 5, 16, 17, 22, 40])
async def test_a_budget_does_not_touch_a_turn_that_does_not_think_or_ends_its_thought(budget: int | None) -> None:
    plain, script = await thought("it is 5, because 2 and 3 are 5", budget)
    require_exact_tokens(plain, script)
    assert (plain.metrics["thought_tokens"], plain.metrics["answer_tokens"]) == (0.0, 31.0)
    if budget is None or budget > 16:
        ended, script = await thought("<think>a</think>5 and nothing else", budget)
        require_exact_tokens(ended, script)
        assert (ended.metrics["thought_tokens"], ended.metrics["answer_tokens"]) == (16.0, 19.0)
        assert ended.metrics.get("ended_thoughts", 0.0) == 0.0


async def test_a_thought_that_leaves_no_room_for_an_answer_is_a_cut_turn() -> None:
    sample, script = await thought("<think>" + "a" * 99, 20, max_tokens=25)
    require_exact_tokens(sample, script)
    assert sample.finish_reason is EndReason.MAX_TOKENS
    assert (len(script.requests), sample.metrics["thought_tokens"]) == (1, 20.0)


@given(
    st.text("ab5 ", max_size=30),
    st.sampled_from(["", "<think>", "<think>a", "<think>a</think>", "</think>"]),
    st.integers(len("<think>") + 1, 50),
    st.sampled_from([CHATML, THINKING]),
)
def test_tokens_are_those_that_the_policy_read_and_sampled_at_any_budget(
    text: str, opening: str, budget: int, template: str
) -> None:
    sample, script = asyncio.run(thought(opening + text, budget, template=template))
    require_exact_tokens(sample, script)
    assert len(script.requests) <= 2
    assert sample.metrics["thought_tokens"] <= budget
