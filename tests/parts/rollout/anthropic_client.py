"""An agent with the `anthropic` package: `anthropic_client.py whole|stream < task.json`. Prints what it saw, as JSON.

It knows only `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. Runs in `.venvs/agents` (scripts/agents_venv.sh).
"""

import json
import os
import sys
from typing import Any

from anthropic import Anthropic, APIStatusError

WEATHER = {
    "name": "get_weather",
    "description": "The temperature in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SYSTEM = [
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Use the tool."},
]
COMMON: dict[str, Any] = {"model": "policy", "max_tokens": 200, "system": SYSTEM}
TOOLS: dict[str, Any] = {"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}
THINKING: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def send(client: Anthropic, mode: str, **request: Any) -> Any:
    if mode == "whole":
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def error_of(client: Anthropic, messages: list[Any]) -> dict[str, str]:
    try:
        client.messages.create(**COMMON, messages=messages)
    except APIStatusError as error:
        return {type(error).__name__: error.response.json()["error"]["message"]}
    return {}


def main(mode: str) -> None:
    question = json.load(sys.stdin)["question"]
    client = Anthropic(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    counted = client.messages.count_tokens(model="policy", system=SYSTEM, messages=messages, **TOOLS)
    first = send(client, mode, **COMMON, **TOOLS, **THINKING, messages=messages)
    use = first.content[-1]
    assert use.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "21 degrees"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = send(client, mode, **COMMON, **TOOLS, **THINKING, messages=messages)
    stopped = send(
        client, mode, **COMMON, messages=[{"role": "user", "content": "Of 21 degrees"}], stop_sequences=["21"]
    )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    elsewhere = Anthropic(max_retries=0, base_url=f"{os.environ['ANTHROPIC_BASE_URL'].rpartition('/')[0]}/other")
    errors = {
        **error_of(client, [{"role": "user", "content": [image]}]),
        **error_of(elsewhere, [{"role": "user", "content": "x"}]),
    }
    found = {
        "first": first.model_dump(mode="json"),
        "last": last.model_dump(mode="json"),
        "counted": counted.input_tokens,
        "stopped": {
            "stop_reason": stopped.stop_reason,
            "stop_sequence": stopped.stop_sequence,
            "text": stopped.content[0].text.rpartition("\n")[2],
        },
        "errors": errors,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
