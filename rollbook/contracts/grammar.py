"""Grammars for completions of a required form: JSON of a schema, or calls of given tools. Text in the Lark dialect of llguidance.

The policy server and the proxy write them; the policy server compiles them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout that chat templates write. A free layout would let a weak policy write blanks without end."""


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema; without one, any JSON object."""
    return f"start: {_json_rule(schema if schema is not None else {'type': 'object'})}\n"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(map(_literal, choices)) + "\n"


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], *, form: str = "hermes", is_single: bool = False) -> str:
    """One call or more of these tools, in OpenAI's format of tools. `form` is the format of calls: `hermes` or `json`.

    Raises `ValueError` for a form that has no grammar.
    """
    arguments = {"hermes": "arguments", "json": "parameters"}.get(form)
    if arguments is None:
        raise ValueError(f"calls in the format {form!r} have no grammar; use hermes or json")
    functions = [tool["function"] for tool in tools]
    names = [json.dumps(function["name"], ensure_ascii=False) for function in functions]
    lines = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        opening = _literal(f'{{"name": {names[at]}, "{arguments}": ')
        lines += [f'call_{at}: {opening} arguments_{at} "}}"']
        lines += [f"arguments_{at}: {_json_rule(function.get('parameters') or {'type': 'object'})}"]
    if form == "json":
        start = "start: call"
    else:
        block = r'"<tool_call>\n" call "\n</tool_call>"'
        start = f"start: {block}" if is_single else f'start: block ("\\n" block)*\nblock: {block}'
    return "\n".join([start, *lines]) + "\n"


def forced_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> list[Mapping[str, Any]]:
    """The tools of which one must be called, by OpenAI's `tool_choice`; empty if the policy decides. Raises `ValueError`."""
    if tool_choice in (None, "auto", "none"):
        return []
    known = list(tools or ())
    if not known:
        raise ValueError(f"tool_choice: {tool_choice!r} requires tools")
    if tool_choice == "required":
        return known
    function = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice: {tool_choice!r} is not auto, none, required or a function with a name")
    named = [tool for tool in known if tool.get("function", {}).get("name") == name]
    if not named:
        raise ValueError(f"tool_choice: {name!r} is not among the tools")
    return named


def response_format_grammar(response_format: Any) -> str | None:
    """The grammar of OpenAI's `response_format`; None for plain text. Raises `ValueError`."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar()
    # The Responses API has the schema directly in the format.
    described = response_format.get("json_schema", response_format) if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError("response_format: the type must be text, json_object, or json_schema with a schema")
    return json_grammar(schema)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": LAYOUT}, ensure_ascii=False)


def _literal(text: str) -> str:
    """A text in a Lark grammar. JSON escapes it the same way."""
    return json.dumps(text, ensure_ascii=False)
