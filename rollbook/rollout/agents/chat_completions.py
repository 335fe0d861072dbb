"""The dialect of `/v1/chat/completions`: bodies in, answers out, whole or as a stream of chunks.

A field that would change what is sampled and is not offered is refused, never ignored; what the run decides (temperature, seed and
their kind) is overridden and told in the sample's facts.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.session import ChatAnswer, ChatRequest

MODEL_NAME = "policy"

DECIDED_BY_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""One sampling distribution for all trained tokens: the trainer computes logprobs under it."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "top_logprobs": (None, 0),
}
"""Fields that are not offered, and the values at which they ask for nothing."""


def refuse_unknown_wishes(body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in neutral.items():
        if body.get(name) not in values:
            raise BadChatError(
                f"{name}: {body[name]!r} is not offered by a policy in training; leave it out or set it to {values[-1]!r}",
                name,
            )


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    refuse_unknown_wishes(body, NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadChatError("messages: a list is needed", "messages")
    tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return ChatRequest(
        messages=messages,
        tools=None if tools is None else [_tool(tool, number) for number, tool in enumerate(tools)],
        max_tokens=checked_max_tokens(most, "max_tokens"),
        stop=_stops(body.get("stop")),
        overridden=tuple(name for name in DECIDED_BY_THE_RUN if body.get(name) is not None),
    )


def checked_max_tokens(most: Any, name: str) -> int | None:
    if most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 1):
        return most
    raise BadChatError(f"{name}: {most!r} is no positive number of tokens", name)


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
    where = f"tools[{number}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise BadChatError(f"{where}: only tools of type function can be given to the policy", where)
    return tool


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(text, str) for text in stops):
        raise BadChatError("stop: a text or a list of texts is needed", "stop")
    return stops


def usage_of(answer: ChatAnswer) -> dict[str, int]:
    sampled = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.num_prompt_tokens + sampled,
    }


def chat_reply(body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.said.content or None, "refusal": None}
    if answer.said.calls:
        message["tool_calls"] = [call.to_openai() for call in answer.said.calls]
    else:
        message["content"] = answer.said.content
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer) if body.get("logprobs") else None,
        "finish_reason": answer.finish_reason,
    }
    return {**_head(body, "chat.completion"), "choices": [choice], "usage": usage_of(answer)}


def chat_chunks(body: Mapping[str, Any], answer: ChatAnswer) -> Iterator[bytes]:
    """The same answer as a stream. The whole turn was sampled before: a stream that breaks would leave half a turn."""
    head = _head(body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]})

    yield chunk({"role": "assistant", "content": "" if not answer.said.calls else None})
    if answer.said.content:
        yield chunk({"content": answer.said.content})
    for number, call in enumerate(answer.said.calls):
        yield chunk({"tool_calls": [{"index": number, **call.to_openai()}]})
    yield chunk({}, answer.finish_reason)
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield event({**head, "choices": [], "usage": usage_of(answer)})
    yield b"data: [DONE]\n\n"


def event(value: Any, name: str | None = None) -> bytes:
    lead = b"" if name is None else f"event: {name}\n".encode()
    return lead + b"data: " + msgspec.json.encode(value) + b"\n\n"


def models() -> dict[str, Any]:
    card = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rollbook"}
    return {"object": "list", "data": [card]}


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or MODEL_NAME,
    }


def _logprobs(answer: ChatAnswer) -> dict[str, Sequence[Any]]:
    pairs = zip(answer.completion.token_ids.tolist(), answer.completion.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in pairs
        ]
    }
