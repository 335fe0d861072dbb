"""`/v1/responses`: items to `ChatRequest`, turns to items. The conversation is the same as with chat completions."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollbook.rollout.agents.chat_completions import (
    MODEL_NAME,
    SET_BY_THE_RUN,
    checked_max_tokens,
    event,
    refuse_unsupported,
    requested_tools,
)
from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.session import ChatRequest, ChatTurn
from rollbook.rollout.contract import Message

NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (None, False),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
}


def responses_request(body: Mapping[str, Any], known: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """`known`: the conversation up to each response of this session, for `previous_response_id`."""
    refuse_unsupported(body, NEUTRAL)
    messages: list[Any] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    previous = body.get("previous_response_id")
    if previous is not None:
        if not isinstance(previous, str) or previous not in known:
            raise BadChatError(
                f"previous_response_id: {previous!r} is not a response of this episode", "previous_response_id"
            )
        messages += known[previous]
    messages += _input_messages(body.get("input"))
    text = body.get("text")
    return ChatRequest(
        messages=messages,
        tools=requested_tools(body, _tool),
        max_tokens=checked_max_tokens(body.get("max_output_tokens"), "max_output_tokens"),
        overridden=tuple(name for name in SET_BY_THE_RUN if body.get(name) is not None),
        tool_choice=body.get("tool_choice"),
        is_single_call=body.get("parallel_tool_calls") is False,
        response_format=text.get("format") if isinstance(text, Mapping) else None,
    )


def _input_messages(items: Any) -> list[dict[str, Any]]:
    """Items to messages. Text and calls of one turn become one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadChatError("input: a text or a list of items is required", "input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise BadChatError(f"{where}: an item must be an object", where)
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
                # Not written by this server, which keeps reasoning in the text.
                continue
            case kind:
                raise BadChatError(f"{where}: items of type {kind!r} are not supported", where)
    return messages


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
    """Tools are flat in this API. Templates expect the nested form of chat completions."""
    where = f"tools[{number}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise BadChatError(f"{where}: only tools of type function are supported", where)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def responses_reply(body: Mapping[str, Any], turn: ChatTurn) -> dict[str, Any]:
    is_cut = turn.finish_reason == "length"
    sampled = len(turn.completion.token_ids)
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
        "output": _items(turn),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"),
        "usage": {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt_tokens + sampled,
        },
    }


def _items(turn: ChatTurn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.parsed.content or not turn.parsed.calls:
        part = {"type": "output_text", "text": turn.parsed.content, "annotations": [], "logprobs": []}
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
        for call in turn.parsed.calls
    ]
    return items


def responses_events(reply: Mapping[str, Any]) -> Iterator[bytes]:
    """The same response as a stream of events. The turn is sampled whole before."""
    number = -1

    def next_event(kind: str, **more: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **more}, kind)

    started = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield next_event("response.created", response=started)
    yield next_event("response.in_progress", response=started)
    for index, item in enumerate(reply["output"]):
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            part = item["content"][0]
            inside = {**where, "content_index": 0}
            empty = {**item, "status": "in_progress", "content": []}
            yield next_event("response.output_item.added", output_index=index, item=empty)
            yield next_event("response.content_part.added", **inside, part={**part, "text": ""})
            yield next_event("response.output_text.delta", **inside, delta=part["text"], logprobs=[])
            yield next_event("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield next_event("response.content_part.done", **inside, part=part)
        else:
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield next_event("response.output_item.added", output_index=index, item=empty)
            yield next_event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield next_event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
            )
        yield next_event("response.output_item.done", output_index=index, item=item)
    end = "response.incomplete" if reply["status"] == "incomplete" else "response.completed"
    yield next_event(end, response=reply)
