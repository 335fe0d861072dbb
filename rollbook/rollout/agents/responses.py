"""`/v1/responses`: items to `ChatRequest`, turns to items. The conversation is the same as with chat completions.

Tools of the types `namespace` and `custom` become functions for the policy, and its calls get the form that the agent expects.
Built-in tools (`web_search`, ...) are left out, because no service of a provider stands behind a policy in training.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollbook.access.event_stream import json_event
from rollbook.contracts.decoding import load_json
from rollbook.contracts.output_formats import ToolCall
from rollbook.rollout.agents.chat_completions import (
    CHANGES_SAMPLING,
    MODEL_NAME,
    SET_BY_THE_RUN,
    checked_max_tokens,
    checked_top_logprobs,
    logprob_entries,
    refuse_unsupported,
    template_arguments,
)
from rollbook.rollout.agents.messages import BadChatError, message_text
from rollbook.rollout.agents.session import ChatRequest, ChatTurn, ProxySession
from rollbook.rollout.agents.streaming import SampledToken, TurnPart, sampled_tokens, unsent_text
from rollbook.rollout.contract import Message

NEUTRAL: dict[str, tuple[object, ...]] = {
    **CHANGES_SAMPLING,
    "background": (None, False),
    "truncation": (None, "disabled"),
}
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests logprobs."""
CUSTOM_INPUT = "input"
"""The parameter of a custom tool, which takes one text."""
NAMESPACE_SEPARATOR = "__"


def responses_request(body: Mapping[str, Any], given: Sequence[Mapping[str, Any]], tools: "_Tools") -> ChatRequest:
    """`given`: the conversation without the instructions of this request."""
    refuse_unsupported(body, NEUTRAL)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise BadChatError("instructions: a string is required", "instructions")
    if not isinstance(body.get("include"), list | None):
        raise BadChatError("include: a list is required", "include")
    first = [{"role": "system", "content": instructions}] if instructions else []
    text, reasoning = body.get("text"), body.get("reasoning")
    return ChatRequest(
        messages=_with_one_system_message([*first, *given]),
        tools=tools.functions or None,
        max_tokens=checked_max_tokens(body.get("max_output_tokens"), "max_output_tokens"),
        overridden=tuple(name for name in SET_BY_THE_RUN if body.get(name) is not None),
        tool_choice=body.get("tool_choice"),
        is_single_call=body.get("parallel_tool_calls") is False,
        response_format=text.get("format") if isinstance(text, Mapping) else None,
        top_logprobs=checked_top_logprobs(body),
        template=template_arguments(body, reasoning.get("effort") if isinstance(reasoning, Mapping) else None),
        left_out=tuple(tools.left_out),
    )


def _given_messages(body: Mapping[str, Any], known: Mapping[str, Sequence[Message]]) -> list[Mapping[str, Any]]:
    """`known`: the conversation up to each response of this session, for `previous_response_id`."""
    previous = body.get("previous_response_id")
    if previous is not None and (not isinstance(previous, str) or previous not in known):
        raise BadChatError(
            f"previous_response_id: {previous!r} is not a response of this episode", "previous_response_id"
        )
    return [*(known[previous] if previous is not None else ()), *_input_messages(body.get("input"))]


def _with_one_system_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Join the system and developer messages at the start: many templates accept only one."""
    count = next(
        (at for at, one in enumerate(messages) if one.get("role") not in ("system", "developer")), len(messages)
    )
    if count < 2:
        return list(messages)
    texts = [
        message_text(message.get("content"), f"input[{at}].content") for at, message in enumerate(messages[:count])
    ]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]


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
            case "function_call" | "custom_tool_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(_earlier_call(item))
            case "function_call_output" | "custom_tool_call_output":
                messages.append(
                    {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id", "")}
                )
            case "reasoning":
                # Not written by this server, which keeps reasoning in the text.
                continue
            case kind:
                raise BadChatError(f"{where}: items of type {kind!r} are not supported", where)
    return messages


def _earlier_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier turn, as the policy wrote it."""
    if item.get("type") == "custom_tool_call":
        function = {"name": item.get("name"), "arguments": {CUSTOM_INPUT: item.get("input", "")}}
    else:
        name = item.get("name")
        joined = _joined(item["namespace"], name) if item.get("namespace") and isinstance(name, str) else name
        function = {"name": joined, "arguments": item.get("arguments", "{}")}
    return {"id": item.get("call_id", ""), "type": "function", "function": function}


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}"


class _Tools:
    """The tools of a request: functions in the nested form that templates expect, and how the agent expects calls of them."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.functions: list[Mapping[str, Any]] = []
        self.left_out: list[str] = []
        self._namespaces: dict[str, tuple[str, str]] = {}
        """Namespace and name, by the name that the policy reads."""
        self._custom: set[str] = set()
        tools = body.get("tools") or []
        if not isinstance(tools, list):
            raise BadChatError("tools: a list is required", "tools")
        if body.get("tool_choice") == "none":
            return
        for number, tool in enumerate(tools):
            if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
                raise BadChatError(f"tools[{number}]: a tool is an object with a type", f"tools[{number}]")
            self._add(tool, f"tools[{number}]")

    def _add(self, tool: Mapping[str, Any], where: str) -> None:
        match tool["type"]:
            case "function":
                self._add_function(tool, where, _name(tool, where))
            case "custom":
                name = _name(tool, where)
                self._custom.add(name)
                schema = {
                    "type": "object",
                    "properties": {CUSTOM_INPUT: {"type": "string"}},
                    "required": [CUSTOM_INPUT],
                }
                self._add_function({**tool, "parameters": schema}, where, name)
            case "namespace":
                namespace, inside = _name(tool, where), tool.get("tools")
                for at, one in enumerate(inside if isinstance(inside, list) else []):
                    name = _name(one, f"{where}.tools[{at}]")
                    joined = _joined(namespace, name)
                    self._namespaces[joined] = namespace, name
                    self._add_function(one, f"{where}.tools[{at}]", joined)
            case kind:
                self.left_out.append(f"tool {kind}")

    def _add_function(self, tool: Mapping[str, Any], where: str, name: str) -> None:
        if not isinstance(tool.get("parameters") or {}, Mapping):
            raise BadChatError(f"{where}.parameters: an object is required", where)
        function = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
        self.functions.append({"type": "function", "function": {"name": name, **function}})

    def item(self, call: ToolCall) -> dict[str, Any]:
        """A call of the policy, as the item that the agent expects."""
        head = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "status": "completed"}
        if call.name in self._custom:
            return {**head, "type": "custom_tool_call", "name": call.name, "input": _custom_input(call.arguments)}
        namespace, name = self._namespaces.get(call.name, (None, call.name))
        named = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        return {**head, "type": "function_call", **named, "arguments": call.arguments}


def _name(tool: Any, where: str) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(name, str):
        raise BadChatError(f"{where}: a tool must have a name", where)
    return name


def _custom_input(arguments: str) -> str:
    """The text for a custom tool; the arguments as written if the policy did not use its parameter."""
    try:
        found = load_json(arguments)
    except ValueError:
        return arguments
    given = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


class ResponsesReply:
    """The response to one request, whole or as a stream."""

    def __init__(self, body: Mapping[str, Any], session: ProxySession) -> None:
        self._tools = _Tools(body)
        self._given = _given_messages(body, session.responses)
        self.request = responses_request(body, self._given, self._tools)
        self._body = body
        self._responses = session.responses
        self._id = f"resp_{uuid.uuid4().hex}"
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = -1
        self._token_bytes = session.token_bytes
        self._has_logprobs = LOGPROBS in (body.get("include") or ()) or self.request.top_logprobs > 0
        self._sent_text = ""
        self._sent_tokens = 0

    def whole(self, turn: ChatTurn) -> dict[str, Any]:
        # Instructions apply to one request only: the next request brings its own.
        self._responses[self._id] = [*self._given, turn.messages[-1]]
        is_cut = turn.finish_reason == "length"
        sampled = len(turn.completion.token_ids)
        return {
            **self._head("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(turn),
            "usage": {
                "input_tokens": turn.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.num_prompt_tokens + sampled,
            },
        }

    def _head(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": body.get("model") or MODEL_NAME,
            "status": status,
            "incomplete_details": None,
            "error": None,
            "instructions": body.get("instructions"),
            "metadata": {},
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "temperature": None,
            "top_p": None,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "previous_response_id": body.get("previous_response_id"),
            "top_logprobs": self.request.top_logprobs,
            "usage": None,
        }

    def _items(self, turn: ChatTurn) -> list[dict[str, Any]]:
        has_message = turn.parsed.content or self._sent_text or not turn.parsed.calls
        logprobs = self._logprobs(sampled_tokens(turn.completion))
        status = "incomplete" if turn.finish_reason == "length" else "completed"
        items = [self._message(status, turn.parsed.content, logprobs)] if has_message else []
        items += [self._tools.item(call) for call in turn.parsed.calls]
        return items

    def _logprobs(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """Logprobs of all sampled tokens, including tool calls and the end token."""
        return logprob_entries(tokens, self._token_bytes) if self._has_logprobs else []

    def _message(self, status: str, text: str | None, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        parts = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def part(self, part: TurnPart) -> Iterator[bytes]:
        """Events for a part of the turn, sent while the rest is sampled."""
        if not self._sent_text:
            yield from self._start()
            yield from self._start_message()
        self._sent_text += part.text
        self._sent_tokens += len(part.tokens)
        yield self._text_event("delta", delta=part.text, logprobs=self._logprobs(part.tokens))

    def end(self, turn: ChatTurn) -> Iterator[bytes]:
        """What was not sent as parts."""
        reply = self.whole(turn)
        if not self._sent_text:
            yield from self._start()
        for index, item in enumerate(reply["output"]):
            yield from self._end_message(item) if item["type"] == "message" else self._call(index, item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        end = "response.incomplete" if reply["status"] == "incomplete" else "response.completed"
        yield self._event(end, response=reply)

    def _start(self) -> Iterator[bytes]:
        started = self._head("in_progress")
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def _start_message(self) -> Iterator[bytes]:
        """The message is the first item of a response."""
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None))
        [empty] = self._message("in_progress", "")["content"]
        yield self._part_event("added", part=empty)

    def _end_message(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._sent_text:
            yield from self._start_message()
        [part] = item["content"]
        text: str = part["text"]
        rest = unsent_text(text, self._sent_text)
        logprobs = part["logprobs"]
        # The logprobs of tool calls and of the end token have no text.
        if rest or not self._sent_text or logprobs[self._sent_tokens :]:
            yield self._text_event("delta", delta=rest, logprobs=logprobs[self._sent_tokens :])
        yield self._text_event("done", text=text, logprobs=logprobs)
        yield self._part_event("done", part=part)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "custom_tool_call":
            empty = {**item, "status": "in_progress", "input": ""}
            yield self._event("response.output_item.added", output_index=index, item=empty)
            yield self._event("response.custom_tool_call_input.delta", **where, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **where, input=item["input"])
            return
        empty = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=empty)
        yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
        )

    def _text_event(self, kind: str, **more: Any) -> bytes:
        return self._event(
            f"response.output_text.{kind}", item_id=self._message_id, output_index=0, content_index=0, **more
        )

    def _part_event(self, kind: str, **more: Any) -> bytes:
        return self._event(
            f"response.content_part.{kind}", item_id=self._message_id, output_index=0, content_index=0, **more
        )

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return json_event({"type": kind, "sequence_number": self._number, **more}, kind)
