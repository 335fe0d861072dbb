"""Tool calls in the formats that families of models write: what is a call, what stays text, and round trips through templates."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.agents.tool_calls import PARSERS, load_parser, parse_llama, parse_qwen
from tests.parts.rollout.family_templates import STYLES, Style

KINDS: dict[str, Any] = {
    "name": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "colour": {"$ref": "#/$defs/Colour"},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": KINDS, "$defs": {"Colour": {"type": "string"}}},
    },
}
# No tags of the formats, and no white space at the ends: templates trim it.
TEXTS = st.text("abcé日 \"'{}[],:\\\n\t;=", max_size=20).filter(lambda text: text == text.strip())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "name": TEXTS,
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "deep": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "options": st.dictionaries(TEXTS, JSON, max_size=3),
        "limit": st.none() | st.integers(),
        "colour": TEXTS,
    },
)


def called(parser: str, text: str, **more: Any) -> list[tuple[str, Any]]:
    parsed = load_parser(parser)(text, [TOOL], **more)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def qwen(*parameters: tuple[str, str], name: str = "look_up") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


WITH_TOOLS = [style for style in STYLES if "tool_calls" in style.template]


@pytest.mark.parametrize("style", WITH_TOOLS, ids=lambda style: style.families)
@given(arguments=ARGUMENTS, more=ARGUMENTS)
def test_a_call_that_a_chat_template_writes_is_parsed_as_the_same_call(
    style: Style, arguments: dict[str, Any], more: dict[str, Any]
) -> None:
    tokenizer = style.tokenizer()
    calls = [arguments] if style.tool_style == "llama" else [arguments, more]
    question = {"role": "user", "content": "?"}
    reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look_up", "arguments": given}} for given in calls],
    }
    before = tokenizer.render([question], add_generation_prompt=True, tools=[TOOL])
    written = tokenizer.render([question, reply], add_generation_prompt=False, tools=[TOOL]).removeprefix(before)
    assert called(style.tool_style, written.removesuffix("\n").removesuffix(style.eos)) == [
        ("look_up", given) for given in calls
    ]


def test_values_of_qwen_have_the_types_of_the_tool_and_what_is_no_such_value_stays_text() -> None:
    given = (
        ("name", "5"),
        ("count", "5"),
        ("share", "1e-3"),
        ("deep", "True"),
        ("items", '[1, "a"]'),
        ("limit", "None"),
        ("colour", "null"),
        ("unknown", "7"),
    )
    expected = {
        "name": "5",
        "count": 5,
        "share": 0.001,
        "deep": True,
        "items": [1, "a"],
        "limit": None,
        "colour": "null",
        "unknown": "7",
    }
    assert called("qwen", qwen(*given)) == [("look_up", expected)]
    assert called("qwen", qwen(("count", "many"))) == [("look_up", {"count": "many"})], "the tool says what is wrong"
    assert called("qwen", qwen(("name", "two\n\nlines\n"))) == [("look_up", {"name": "two\n\nlines\n"})]
    odd: list[dict[str, Any]] = [
        {},
        {"function": 5},
        {"function": {"name": "look_up", "parameters": {"properties": [1]}}},
    ]
    assert [call.name for call in parse_qwen(qwen(("count", "5")), odd).calls] == ["look_up"]
    text = f"First.\n{qwen(('count', '1'))}\nThen {qwen()}"
    parsed = parse_qwen(text, [TOOL])
    assert (parsed.content, len(parsed.calls)) == ("First.\n\nThen", 2)


@pytest.mark.parametrize(
    "text",
    [
        qwen(("count", "1"), ("count", "2")),
        qwen(name=""),
        "<tool_call><function=look_up></tool_call>",
        "<tool_call><function=look_up>text</function></tool_call>",
        "<tool_call><function=look_up><parameter=count>1</function></tool_call>",
        "<function=look_up></function>",
        '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>',
    ],
)
def test_text_that_is_no_call_of_qwen_stays_text(text: str) -> None:
    parsed = parse_qwen(text, [TOOL])
    assert (parsed.content, parsed.calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ('{"name": "f", "parameters": {"x": ";"}}; {"name": "g", "arguments": {}} ;', [("f", {"x": ";"}), ("g", {})]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"y": null}}]', [("f", {}), ("g", {"y": None})]),
        ("[f(x=1, y='a\\n', z=[True, None, -2.5]), a.b()]", [("f", {"x": 1, "y": "a\n", "z": [True, None, -2.5]}), ("a.b", {})]),
        (r"[f(x='\d')]", [("f", {"x": "\\d"})]),
    ],
)  # fmt: skip
def test_every_form_of_llama_is_parsed(text: str, calls: list[tuple[str, Any]]) -> None:
    assert called("llama", text) == calls
    assert called("llama", f"<think>hm</think>\n\n{text}") == calls


@pytest.mark.parametrize(
    "text",
    [
        "It is 5.",
        "[]",
        "[1, 2]",
        '{"name": "f"} {"name": "g"}',
        '{"name": "f"}; then',
        '[{"name": "f"}, {"no": "name"}]',
        "[f(1)]",
        "[f(**{'x': 1})]",
        "[f(x=1, x=2)]",
        "[f(x=open('a'))]",
        "[f(x=1)(y=2)]",
        "[f(x=b'a')]",
        "[f(x=1e999)]",
        "[f(x=1), 2]",
        "[f(x=" + "-" * 50_000 + "1)]",
        "[f(x=" + "(" * 5_000 + ")]",
        "[f(x='" + "a" * 30_000 + "')]",
        '{"name": ' + "[" * 100_000,
        "[f(x='\ud800')]",
    ],
)
def test_text_that_is_no_call_of_llama_stays_text(text: str) -> None:
    parsed = parse_llama(text)
    assert (parsed.content, parsed.calls) == (text, ())


CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "json": '{"name": "f", "parameters": {}}',
    "llama": "[f()]",
    "qwen": "<tool_call><function=f></function></tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_thought_is_not_executed_and_one_after_it_is(name: str) -> None:
    call, parse = CALLS[name], PARSERS[name]
    for text, prompt in (
        (f"<think>I could write {call}", ""),
        (f"<think>{call}</think>\nNo.", ""),
        (f"{call}</think>\nNo.", "<|assistant|>\n<think>\n"),
        (call, "<|assistant|>\n<think>\n"),
        (f"<think>a</think><think>{call}", ""),
        (f"<think>a</think>{call}</think>No.", ""),
    ):
        assert (parse(text, prompt=prompt).calls, parse(text, prompt=prompt).content) == ((), text)
    for text, prompt in (
        (call, "<|assistant|>\n<think>\n\n</think>\n\n"),
        (f"<think>{call}</think>\n{call}", ""),
        (f"so</think>\n{call}", "<think>"),
        (f"{call}\n<think>{call}", ""),
    ):
        parsed = parse(text, prompt=prompt)
        assert [one.name for one in parsed.calls] == ["f"]
        assert parsed.content == text.rpartition(call)[0].strip() or parsed.content == f"<think>{call}"
    own = load_parser(name, tags=("[THINK]", "[/THINK]"))
    assert not own(f"[THINK]{call}").calls
    assert own(f"[THINK]no[/THINK]{call}").calls
