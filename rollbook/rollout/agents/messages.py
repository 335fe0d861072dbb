"""Normalises the chat messages that agents send: for the chat template, and to recognise earlier turns.

Messages are equal when their meaning is: `null` content equals empty content, a list of text parts equals their text, arguments are
compared as JSON, and white space around an assistant's text is ignored.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import EpisodeError
from rollbook.rollout.agents.tool_calls import canonical_arguments
from rollbook.rollout.contract import Message


class BadChatError(EpisodeError):
    """A request that is invalid or asks for something not supported. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.param))


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def normalised(messages: Sequence[Any]) -> list[Message]:
    """Messages for the template. Raises `BadChatError` that names the message."""
    if not messages:
        raise BadChatError("messages: at least one message is required", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str) or raw["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise BadChatError(f"{where}: a message is an object with a role, one of {known}", where)
    message: dict[str, Any] = {
        "role": ROLES[raw["role"]],
        "content": message_text(raw.get("content"), f"{where}.content"),
    }
    if raw.get("name"):
        message["name"] = raw["name"]
    if raw.get("tool_call_id"):
        message["tool_call_id"] = raw["tool_call_id"]
    if raw.get("tool_calls"):
        if not isinstance(raw["tool_calls"], list):
            raise BadChatError(f"{where}.tool_calls: a list is required", f"{where}.tool_calls")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(raw["tool_calls"])]
    return message


def message_text(content: Any, where: str) -> str:
    """The text of a message. Raises `BadChatError` for parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadChatError(f"{where}: text or a list of text parts is required, not a {type(content).__name__}", where)
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadChatError(f"{where}: only text is supported, not {kind!r}", where)
    return "".join(texts)


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadChatError(f"{where}: a tool call must have a function with a name", where)
    arguments = function.get("arguments", "{}")
    with suppress(ValueError):
        # Templates write the JSON themselves, so they expect the object and not its text.
        arguments = load_json(arguments) if isinstance(arguments, str) else arguments
    return {
        "id": raw.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def digests(messages: Iterable[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[bytes]:
    """One digest for each prefix of the messages, tools included. Prefixes with the same meaning have the same digest."""
    rolling = hashlib.blake2b(_stable(list(tools or [])), digest_size=16)
    prefixes: list[bytes] = []
    for message in messages:
        rolling.update(_stable(_meaning(message)))
        prefixes.append(rolling.copy().digest())
    return prefixes


def _meaning(message: Message) -> Any:
    content = message.get("content") or ""
    role = message["role"]
    calls = [
        (call["function"]["name"], canonical_arguments(_as_text(call["function"]["arguments"])), call.get("id", ""))
        for call in message.get("tool_calls", ())
    ]
    return [role, content.strip() if role == "assistant" else content, message.get("tool_call_id", ""), calls]


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _stable(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\0"
