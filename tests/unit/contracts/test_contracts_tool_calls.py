"""The one parser of Hermes tool calls, used by the policy server and by the agents' endpoint."""

import json

import pytest

from rollbook.contracts.output_formats import ToolCall, parse_tool_calls


def block(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_calls_are_removed_from_the_text_and_returned_in_order() -> None:
    text = f"a {block({'name': 'f', 'arguments': {'x': 'é'}})} b{block({'name': 'g', 'parameters': {}})}"
    assert parse_tool_calls(text) == ("a  b", [ToolCall("f", '{"x": "é"}'), ToolCall("g", "{}")])


def test_arguments_written_as_json_text_are_kept() -> None:
    assert parse_tool_calls(block({"name": "f", "arguments": '{"x":1}'}))[1] == [ToolCall("f", '{"x":1}')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}',
        block([]),
        block({"arguments": {}}),
        block({"name": ""}),
        block({"name": 3}),
        block({"name": "f", "arguments": [1]}),
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 5_000 + "]" * 5_000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": "' + "[" * 5_000 + "]" * 5_000 + '"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1' + "0" * 5_000 + "}}</tool_call>",
    ],
)
def test_an_invalid_call_stays_text(text: str) -> None:
    assert parse_tool_calls(f"before {text}") == (f"before {text}", [])


def test_an_invalid_call_does_not_hide_a_valid_one() -> None:
    bad = "<tool_call>{broken</tool_call>"
    assert parse_tool_calls(bad + block({"name": "f"})) == (bad, [ToolCall("f", "{}")])


def test_each_call_has_its_own_id() -> None:
    _, calls = parse_tool_calls(block({"name": "f"}) * 2)
    assert calls[0].id != calls[1].id
    assert calls[0].to_openai()["function"] == {"name": "f", "arguments": "{}"}


def test_lone_surrogates_stay_escaped_and_large_integers_keep_their_digits() -> None:
    text = '<tool_call>{"name": "f\\ud800", "arguments": {"x": "\\ud83d", "y": 36893488147419103232}}</tool_call>'
    _, [call] = parse_tool_calls(text)
    assert call == ToolCall("f\\ud800", '{"x": "\\ud83d", "y": 36893488147419103232}')
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud83d", "y": 2**65}
