"""`/v1/messages`: Anthropic's API to `ChatRequest`, turns to blocks. The conversation is the same as with OpenAI's two APIs.

Reasoning that the policy writes between `<think>` and `</think>` is a `thinking` block if the request enables thinking, and part of
the text otherwise. The block comes back unchanged, with its signature, so that the turn is recognised.
"""

import base64
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.access.event_stream import json_event
from rollbook.contracts.decoding import load_json
from rollbook.rollout.agents.chat_completions import (
    MODEL_NAME,
    checked_max_tokens,
    checked_stop_strings,
    template_arguments,
)
from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.session import ChatRequest, ChatTurn, ProxySession
from rollbook.rollout.agents.streaming import TurnPart, unsent_text

SET_BY_THE_RUN = ("temperature", "top_p", "top_k")
LEFT_OUT = ("mcp_servers", "context_management", "container")
"""Services of Anthropic's servers. A policy in training cannot have them."""
OPENING, CLOSING = "<think>", "</think>"
BILLING = "x-anthropic-billing-header:"
"""Claude Code puts this line, with a number that changes, before its system prompt. It would change the prompt in every turn."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def messages_error(status: int, _kind: str, message: str, _param: str | None = None) -> dict[str, Any]:
    default = "invalid_request_error" if status < 500 else "overloaded_error" if status == 503 else "api_error"
    return {"type": "error", "error": {"type": ERROR_TYPES.get(status, default), "message": message}}


def messages_request(body: Mapping[str, Any], *, is_counted_only: bool = False) -> ChatRequest:
    if not is_counted_only and body.get("max_tokens") is None:
        raise BadChatError("max_tokens: a number of tokens is required", "max_tokens")
    left_out = [name for name in LEFT_OUT if body.get(name)]
    system, billing = _system(body.get("system"))
    tools, unknown = _tools(body.get("tools"))
    choice, is_single = _tool_choice(body.get("tool_choice"))
    output = body.get("output_config")
    output = output if isinstance(output, Mapping) else {}
    return ChatRequest(
        messages=[*system, *_messages(body.get("messages"))],
        tools=None if choice == "none" else tools,
        max_tokens=checked_max_tokens(body.get("max_tokens"), "max_tokens"),
        stop=checked_stop_strings(body.get("stop_sequences"), "stop_sequences"),
        overridden=tuple(name for name in SET_BY_THE_RUN if body.get(name) is not None),
        tool_choice=choice,
        is_single_call=is_single,
        response_format=output.get("format") or body.get("output_format"),
        template=template_arguments(body, output.get("effort")),
        left_out=(*left_out, *billing, *unknown),
    )


def _system(system: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The system message, if there is one, and what was left out of it."""
    if system is None:
        return [], []
    if isinstance(system, str):
        return [{"role": "system", "content": system}], []
    texts = [block["text"] for block in _blocks(system, "system") if _is_text(block, "system")]
    kept = [text for text in texts if not text.startswith(BILLING)]
    return [{"role": "system", "content": "\n\n".join(kept)}], ["system: billing header"] * (len(kept) < len(texts))


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise BadChatError("messages: a list is required", "messages")
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise BadChatError(f"{where}: a message is an object with the role user, assistant or system", where)
        content = message.get("content")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "assistant":
            found.append(_assistant(_blocks(content, f"{where}.content"), f"{where}.content"))
        else:
            found += _user(role, _blocks(content, f"{where}.content"), f"{where}.content")
    return found


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Blocks of one turn to one message."""
    text, calls = "", []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                text += Thinking.joined(block)
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id", ""), "type": "function", "function": function})
            case _ if _is_text(block, f"{where}[{number}]"):
                text += block["text"]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _user(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Tool results are messages of their own; text before, between and after them stays in order."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            content = block.get("content")
            if isinstance(content, list):
                content = "".join(part["text"] for part in _blocks(content, at) if _is_text(part, at))
            found.append({"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id", "")})
        elif _is_text(block, at):
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": ""})
            found[-1]["content"] += block["text"]
    return found or [{"role": role, "content": ""}]


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadChatError(f"{where}: text or a list of blocks is required", where)
    return content


def _is_text(block: Mapping[str, Any], where: str) -> bool:
    """True, or `BadChatError` for a block that is no text."""
    if block.get("type", "text") != "text" or not isinstance(block.get("text"), str):
        raise BadChatError(f"{where}: blocks of type {block.get('type')!r} are not supported, only text", where)
    return True


def _tools(tools: Any) -> tuple[list[Mapping[str, Any]] | None, list[str]]:
    """The tools that have a schema, in the form of chat completions, and the types of the others."""
    if not tools:
        return None, []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadChatError("tools: a list of objects is required", "tools")
    found: list[Mapping[str, Any]] = []
    unknown: list[str] = []
    for number, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            unknown.append(f"tool {tool['type']}")
            continue
        if not isinstance(tool.get("name"), str):
            raise BadChatError(f"tools[{number}]: a tool must have a name", f"tools[{number}]")
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        if tool.get("description"):
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found or None, unknown


def _tool_choice(choice: Any) -> tuple[Any, bool]:
    """In OpenAI's form, and whether only one call is allowed."""
    if choice is None:
        return None, False
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    is_single = kind is not None and bool(choice.get("disable_parallel_tool_use"))
    match kind:
        case "auto" | "none":
            return kind, is_single
        case "any":
            return "required", is_single
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, is_single
    raise BadChatError("tool_choice: the type must be auto, any, tool or none", "tool_choice")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning at the start of a reply. `before` and `after` are the policy's text around it: the opening tag, unless the template
    wrote it, and the closing tag with the white space after it. Clients may strip the latter from a text block."""

    before: str
    text: str
    after: str

    @classmethod
    def split(cls, reply: str) -> tuple["Thinking | None", str]:
        """The reasoning, if there is any, and the text after it."""
        head, closing, rest = reply.partition(CLOSING)
        before, opening, inside = head.partition(OPENING)
        if not closing or (opening and before.strip()):
            return None, reply
        text = rest.lstrip()
        after = closing + rest[: len(rest) - len(text)]
        return cls(before + opening, inside, after) if opening else cls("", head, after), text

    def block(self) -> dict[str, Any]:
        around = json.dumps([self.before, self.after]).encode()
        return {"type": "thinking", "thinking": self.text, "signature": base64.b64encode(around).decode()}

    @staticmethod
    def joined(block: Mapping[str, Any]) -> str:
        """The policy's text of a block. A block of another server has other signatures."""
        try:
            before, after = load_json(base64.b64decode(block["signature"]).decode())
        except (KeyError, TypeError, ValueError):
            before, after = OPENING, CLOSING
        return f"{before}{block.get('thinking') or ''}{after}"


class MessagesReply:
    """The response to one request, whole or as a stream."""

    def __init__(self, body: Mapping[str, Any], _session: ProxySession) -> None:
        self.request = messages_request(body)
        self._model = body.get("model") or MODEL_NAME
        self._id = f"msg_{uuid.uuid4().hex}"
        thinking = body.get("thinking")
        self._has_thinking = isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")
        self._sent_text = ""

    def whole(self, turn: ChatTurn) -> dict[str, Any]:
        return {
            **self._head(),
            "content": self._content(turn),
            "stop_reason": self._stop_reason(turn),
            "stop_sequence": turn.stopped_by,
            "usage": self._usage(turn),
        }

    def part(self, part: TurnPart) -> Iterator[bytes]:
        """Events for a part of the turn, sent while the rest is sampled. Reasoning is sent at the end, in one piece."""
        if self._has_thinking:
            return
        if not self._sent_text:
            yield self._start()
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._sent_text += part.text
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": part.text})

    def end(self, turn: ChatTurn) -> Iterator[bytes]:
        """What was not sent as parts."""
        if not self._sent_text:
            yield self._start()
        for index, block in enumerate(self._content(turn)):
            yield from self._block(index, block)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": self._stop_reason(turn), "stop_sequence": turn.stopped_by}
        yield _event("message_delta", delta=ended, usage=self._usage(turn))
        yield _event("message_stop")

    def _block(self, index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
        match block["type"]:
            case "text":
                if not self._sent_text:
                    yield _event("content_block_start", index=index, content_block={"type": "text", "text": ""})
                if rest := unsent_text(block["text"], self._sent_text):
                    yield _event("content_block_delta", index=index, delta={"type": "text_delta", "text": rest})
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield _event("content_block_start", index=index, content_block=empty)
                for name in ("thinking", "signature"):
                    delta = {"type": f"{name}_delta", name: block[name]}
                    yield _event("content_block_delta", index=index, delta=delta)
            case _:
                yield _event("content_block_start", index=index, content_block={**block, "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
                yield _event("content_block_delta", index=index, delta=delta)

    def _start(self) -> bytes:
        # The prompt is counted in the last event: the first may be sent before the turn is complete.
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head(), **empty, "usage": _usage(0, 0)})

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _content(self, turn: ChatTurn) -> list[dict[str, Any]]:
        thinking, text = Thinking.split(turn.parsed.content) if self._has_thinking else (None, turn.parsed.content)
        blocks = [] if thinking is None else [thinking.block()]
        if text or self._sent_text or not (turn.parsed.calls or blocks):
            blocks.append({"type": "text", "text": text})
        calls = turn.parsed.calls
        blocks += [
            {"type": "tool_use", "id": one.id, "name": one.name, "input": _input(one.arguments)} for one in calls
        ]
        return blocks

    @staticmethod
    def _stop_reason(turn: ChatTurn) -> str:
        if turn.stopped_by is not None and not turn.parsed.calls:
            return "stop_sequence"
        return STOP_REASONS[turn.finish_reason]

    @staticmethod
    def _usage(turn: ChatTurn) -> dict[str, int]:
        return _usage(turn.num_prompt_tokens, len(turn.completion.token_ids))


def _usage(consumed: int, sampled: int) -> dict[str, int]:
    return {
        "input_tokens": consumed,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _input(arguments: str) -> Any:
    """Arguments of a call as the object that this API sends. Parsers return the JSON of an object; a user's may not."""
    try:
        found = load_json(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _event(kind: str, **more: Any) -> bytes:
    return json_event({"type": kind, **more}, kind)
