"""Checks whether a chat template keeps sampled replies, by playing conversations turn by turn as an agent does.

A case is exact when every prompt after the first extends the exact tokens so far: then an episode is one sequence (`linear`). A
template that rewrites earlier turns starts a new sequence there (`branching`), and the first difference is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollbook.rollout.agents.history import ChatHistory, PlayedTurn
from rollbook.rollout.agents.messages import normalised
from rollbook.rollout.agents.tool_calls import PARSERS, ParsedText, ToolParser
from rollbook.rollout.assemblers.assembler import first_difference
from rollbook.rollout.contract import Message, RenderError, Tokenizer


class TemplateVerdict(StrEnum):
    EXACT = "exact"
    REWRITTEN = "rewritten"
    """The template changes an earlier reply, so a new sequence starts."""
    UNSUPPORTED = "unsupported"
    """The template refuses such messages or omits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation: the messages before each reply, and the reply. `is_cut`: sampling ended without an end token."""

    name: str
    turns: Sequence[tuple[Sequence[Message], str]]
    tools: Sequence[Mapping[str, Any]] | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFinding:
    case: str
    verdict: TemplateVerdict
    detail: str = ""
    drift: int | None = None
    """First token that would differ if the last history were tokenised again from its text; None if none would."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "call_0"}


WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOSE_CALL = '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>'
WIDE_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
JSON_CALL = '{"name":"get_weather","parameters":{"city":"Paris"}}'
QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
THOUGHT = "<think>\nThe city is Paris.\n</think>\n\n"

CASES: tuple[Case, ...] = (
    Case(
        name="two turns",
        turns=[([user("What is 2+2?")], "4"), ([user("And 3+3?")], "6"), ([user("Thanks")], "Bye")],
    ),
    Case(
        name="system message",
        turns=[([system("Be brief."), user("What is 2+2?")], "4"), ([user("And 3+3?")], "6")],
    ),
    Case(name="empty turns", turns=[([user("")], ""), ([user("")], "yes"), ([user("?")], "")]),
    Case(
        name="unicode",
        turns=[([user("Grüße, 東京! \u05e9\u05dc\u05d5\u05dd")], "👩‍👩‍👧 e\u0301 \u00a0…"), ([user("🇫🇷?")], "ok")],
    ),
    Case(
        name="white space around answers", turns=[([user("a")], "  4 \n\n"), ([user("b")], "\n\n6"), ([user("c")], " ")]
    ),
    Case(
        name="code and markup",
        turns=[([user("<b>&amp;</b> {{ x }}")], "```py\nx = '<1>'\n```"), ([user("{% y %}")], "")],
    ),
    Case(name="answer cut by a limit", turns=[([user("Count")], "1, 2, 3"), ([user("go on")], "4")], is_cut=True),
    Case(name="thinking, then a user turn", turns=[([user("Which?")], f"{THOUGHT}Paris"), ([user("Sure?")], "Yes")]),
)

TOOL_CASES: dict[str, tuple[Case, ...]] = {
    "hermes": (
        Case(
            name="tool call and result",
            turns=[([user("Paris?")], CLOSE_CALL), ([tool("21 degrees")], "It is 21."), ([user("Thanks")], "Bye")],
            tools=[WEATHER],
        ),
        Case(
            name="two calls with text",
            turns=[([user("Both?")], f"Let me see.\n{WIDE_CALL}\n{CLOSE_CALL}"), ([tool("7"), tool("21")], "7 and 21")],
            tools=[WEATHER],
        ),
        Case(
            name="thinking in a tool loop",
            turns=[([user("Paris?")], f"{THOUGHT}{WIDE_CALL}"), ([tool("7 degrees")], f"{THOUGHT}It is 7.")],
            tools=[WEATHER],
        ),
    ),
    "json": (
        Case(
            name="tool call and result",
            turns=[([user("Paris?")], JSON_CALL), ([tool("21 degrees")], "It is 21."), ([user("Thanks")], "Bye")],
            tools=[WEATHER],
        ),
    ),
    "llama": (
        Case(
            name="tool call and result",
            turns=[([user("Paris?")], JSON_CALL), ([tool("21 degrees")], "It is 21."), ([user("Thanks")], "Bye")],
            tools=[WEATHER],
        ),
    ),
    "qwen": (
        Case(
            name="tool call and result",
            turns=[([user("Paris?")], QWEN_CALL), ([tool("21 degrees")], "It is 21."), ([user("Thanks")], "Bye")],
            tools=[WEATHER],
        ),
        Case(
            name="thinking in a tool loop",
            turns=[([user("Paris?")], f"{THOUGHT}{QWEN_CALL}"), ([tool("21 degrees")], f"{THOUGHT}It is 21.")],
            tools=[WEATHER],
        ),
    ),
    "none": (),
}
"""By format of tool calls."""


def check_template(
    tokenizer: Tokenizer, *, style: str = "hermes", parser: ToolParser | None = None
) -> list[TemplateFinding]:
    """`style`: format of tool calls. A user's parser is checked with the Hermes cases."""
    cases = (*CASES, *TOOL_CASES.get(style, TOOL_CASES["hermes"]))
    return [_check(tokenizer, parser or PARSERS[style], case) for case in cases]


def advice(findings: Sequence[TemplateFinding]) -> str:
    """Which assembler to use."""
    rewritten = [finding.case for finding in findings if finding.verdict is TemplateVerdict.REWRITTEN]
    if not rewritten:
        return "every case is exact: with `linear` and `branching` an episode is one sequence"
    if len(rewritten) == sum(finding.verdict is not TemplateVerdict.UNSUPPORTED for finding in findings):
        return "no history is kept: use `per_turn`, or a template that keeps earlier turns unchanged"
    return f"earlier turns are rewritten ({', '.join(rewritten)}): use `branching`; `linear` refuses such episodes"


def _check(tokenizer: Tokenizer, parser: ToolParser, case: Case) -> TemplateFinding:
    try:
        return _play(tokenizer, parser, case)
    except RenderError as error:
        return TemplateFinding(case=case.name, verdict=TemplateVerdict.UNSUPPORTED, detail=str(error))


def _play(tokenizer: Tokenizer, parser: ToolParser, case: Case) -> TemplateFinding:
    history = ChatHistory(tokenizer, parser)
    end = tokenizer.eos_token_ids[:1]
    end_text = "" if case.is_cut else tokenizer.decode(end, skip_special_tokens=False)
    messages: list[Message] = []
    drift: int | None = None
    for number, (before, written) in enumerate(case.turns, start=1):
        messages = normalised([*messages, *before])
        if omission := _omission(tokenizer, messages, before, case.tools):
            return TemplateFinding(case=case.name, verdict=TemplateVerdict.UNSUPPORTED, detail=omission)
        prompt = history.prompt(messages, case.tools)
        if prompt.rewrite is not None or (number > 1 and not prompt.is_continued):
            cause = prompt.rewrite or "the earlier reply was not recognised"
            return TemplateFinding(
                case=case.name, verdict=TemplateVerdict.REWRITTEN, detail=f"before turn {number}: {cause}"
            )
        drift = _first_drift(prompt.token_ids, tokenizer.encode(prompt.rendered))
        reply = _fitting(written, prompt.rendered)
        parsed = parser(reply, tools=case.tools, prompt=prompt.rendered) if case.tools else ParsedText(reply)
        tokens = prompt.token_ids + tokenizer.encode(reply) + ([] if case.is_cut else list(end))
        messages = normalised([*messages, parsed.to_message()])
        history.add(
            messages,
            case.tools,
            PlayedTurn(
                tokens=tokens,
                rendered=prompt.rendered,
                reply=reply,
                end_text=end_text,
                prompt=prompt.rendered,
            ),
        )
    return TemplateFinding(case=case.name, verdict=TemplateVerdict.EXACT, drift=drift)


def _fitting(reply: str, prompt: str) -> str:
    """The reply of a policy that gets this prompt: it continues a thought that the prompt opens, and does not think again after one
    that the prompt closes."""
    end = prompt.rstrip()
    if end.endswith("<think>"):
        return THOUGHT.removeprefix("<think>\n") + reply.removeprefix(THOUGHT)
    return reply.removeprefix(THOUGHT) if end.endswith("</think>") else reply


def _omission(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    before: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """What the template leaves out of the messages, as text; empty if nothing."""
    text = tokenizer.render(messages, add_generation_prompt=True, tools=tools)
    for message in before:
        if message["content"].strip() not in text:
            return f"the template omits or changes {message['role']} messages ({message['content'][:40]!r})"
    if tools and text == tokenizer.render(messages, add_generation_prompt=True):
        return "the template does not render tools"
    return ""


def _first_drift(exact: Sequence[int], again: Sequence[int]) -> int | None:
    at = first_difference(exact, again)
    if at is None and len(exact) != len(again):
        return min(len(exact), len(again))
    return at
