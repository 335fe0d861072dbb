"""The dialect of `/v1/responses`: items in, items out. The conversation underneath is the same as that of chat completions."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollbook.rollout.agents.chat_completions import (
    DECIDED_BY_THE_RUN,
    MODEL_NAME,
    checked_max_tokens,
    event,
    refuse_unknown_wishes,
)
from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.session import ChatAnswer, ChatRequest
from rollbook.rollout.contract import Message

NEUTRAL: dict[str, tuple[object, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "text": (None, {}, {"format": {"type": "text"}}),
    "top_logprobs": (None, 0),
}


def responses_request(body: Mapping[str, Any], known: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """`known`: the conversation behind each answer of this session, for `previous_response_id`."""
    refuse_unknown_wishes(body, NEUTRAL)
    messages: list[Any] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    previous = body.get("previous_response_id")
    if previous is not None:
        if previous not in known:
            raise BadChatError(
                f"previous_response_id: {previous!r} is not an answer of this episode", "previous_response_id"
            )
        messages += known[previous]
    messages += _input_messages(body.get("input"))
    tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
    return ChatRequest(
        messages=messages,
        tools=None if tools is None else [_tool(tool, number) for number, tool in enumerate(tools)],
        max_tokens=checked_max_tokens(body.get("max_output_tokens"), "max_output_tokens"),
        overridden=tuple(name for name in DECIDED_BY_THE_RUN if body.get(name) is not None),
    )


def _input_messages(items: Any) -> list[dict[str, Any]]:
    """Items to messages: calls join the text they came with, as one answer of the policy."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadChatError("input: a text or a list of items is needed", "input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise BadChatError(f"{where}: an item is an object", where)
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                messages[-1].setdefault("tool_calls", []).append(
                    {"id": item.get("call_id", ""), "type": "function", "function": call}
                )
            case "function_call_output":
                messages.append(
                    {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id", "")}
                )
            case "reasoning":
                # Not ours: this server's answers hold their reasoning in their text.
                continue
            case kind:
                raise BadChatError(f"{where}: items of type {kind!r} cannot be given to the policy", where)
    return messages


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
    """Flat here, nested in chat completions; templates know the nested form."""
    where = f"tools[{number}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise BadChatError(f"{where}: only tools of type function can be given to the policy", where)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def responses_reply(body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    sampled = len(answer.completion.token_ids)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or MODEL_NAME,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": _items(answer),
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + sampled,
        },
    }


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.said.content or not answer.said.calls:
        part = {"type": "output_text", "text": answer.said.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    items += [
        {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in answer.said.calls
    ]
    return items


def responses_events(reply: Mapping[str, Any]) -> Iterator[bytes]:
    """The same answer as a stream of events. The whole turn was sampled before."""
    number = -1

    def told(kind: str, **more: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **more}, kind)

    begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield told("response.created", response=begun)
    yield told("response.in_progress", response=begun)
    for index, item in enumerate(reply["output"]):
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            part = item["content"][0]
            inside = {**where, "content_index": 0}
            empty = {**item, "status": "in_progress", "content": []}
            yield told("response.output_item.added", output_index=index, item=empty)
            yield told("response.content_part.added", **inside, part={**part, "text": ""})
            yield told("response.output_text.delta", **inside, delta=part["text"], logprobs=[])
            yield told("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield told("response.content_part.done", **inside, part=part)
        else:
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield told("response.output_item.added", output_index=index, item=empty)
            yield told("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield told("response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        yield told("response.output_item.done", output_index=index, item=item)
    end = "response.incomplete" if reply["status"] == "incomplete" else "response.completed"
    yield told(end, response=reply)
