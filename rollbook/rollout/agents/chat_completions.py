"""`/v1/chat/completions`: request bodies to `ChatRequest`, turns to responses, whole or as a stream.

An unsupported field that would change sampling is refused, never ignored. Fields that the run decides (temperature, seed, ...) are
overridden and listed in the sample's facts.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollbook.access.event_stream import DONE, json_event
from rollbook.contracts.output_formats import checked_stops
from rollbook.contracts.policy import MAX_TOP_LOGPROBS
from rollbook.rollout.agents.messages import BadChatError
from rollbook.rollout.agents.session import ChatRequest, ChatTurn, ProxySession
from rollbook.rollout.agents.streaming import SampledToken, TurnPart, sampled_tokens, unsent_text

MODEL_NAME = "policy"

SET_BY_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""All trained tokens come from one sampling distribution, because the trainer computes logprobs under it."""

CHANGES_SAMPLING: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
}
"""Unsupported fields of OpenAI and vLLM, and the values that have no effect."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    **CHANGES_SAMPLING,
    "n": (None, 1),
    "best_of": (None, 1),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "chat_template": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in neutral.items():
        if body.get(name) not in values:
            raise BadChatError(
                f"{name}: {body[name]!r} is not supported by a policy in training; leave it out or set it to {values[-1]!r}",
                name,
            )


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    refuse_unsupported(body, NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadChatError("messages: a list is required", "messages")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ChatRequest(
        messages=messages,
        tools=requested_tools(body, _tool),
        max_tokens=checked_max_tokens(body.get(limit), limit),
        stop=checked_stop_strings(body.get("stop"), "stop"),
        overridden=tuple(name for name in SET_BY_THE_RUN if body.get(name) is not None),
        tool_choice=body.get("tool_choice"),
        is_single_call=body.get("parallel_tool_calls") is False,
        response_format=body.get("response_format"),
        top_logprobs=checked_top_logprobs(body) if body.get("logprobs") else 0,
        template=template_arguments(body, body.get("reasoning_effort")),
    )


def requested_tools(
    body: Mapping[str, Any], convert: Callable[[Any, int], Mapping[str, Any]]
) -> list[Mapping[str, Any]] | None:
    """The tools of a request, converted; None if there are none or `tool_choice` excludes them."""
    tools = body.get("tools")
    if not tools or body.get("tool_choice") == "none":
        return None
    if not isinstance(tools, list):
        raise BadChatError("tools: a list is required", "tools")
    return [convert(tool, number) for number, tool in enumerate(tools)]


def template_arguments(body: Mapping[str, Any], reasoning_effort: Any) -> dict[str, Any]:
    """The arguments of the chat template, with vLLM's name."""
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise BadChatError("chat_template_kwargs: an object is required", "chat_template_kwargs")
    return {**({} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}), **arguments}


def checked_top_logprobs(body: Mapping[str, Any]) -> int:
    count = body.get("top_logprobs") or 0
    if not isinstance(count, int) or not 0 <= count <= MAX_TOP_LOGPROBS:
        raise BadChatError(f"top_logprobs: {count!r} is not a number from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    return count


def checked_max_tokens(value: Any, name: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise BadChatError(f"{name}: {value!r} is not a positive number of tokens", name)


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
    where = f"tools[{number}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise BadChatError(f"{where}: only tools of type function are supported", where)
    return tool


def checked_stop_strings(stop: Any, name: str) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(text, str) for text in stops):
        raise BadChatError(f"{name}: a string or a list of strings is required", name)
    try:
        return checked_stops(stops)
    except ValueError as error:
        raise BadChatError(str(error), name) from error


def _usage(turn: ChatTurn) -> dict[str, int]:
    sampled = len(turn.completion.token_ids)
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.num_prompt_tokens + sampled,
    }


class ChatCompletion:
    """The response to one request, whole or as a stream."""

    def __init__(self, body: Mapping[str, Any], session: ProxySession) -> None:
        self.request = chat_request(body)
        self._token_bytes = session.token_bytes
        self._has_logprobs = bool(body.get("logprobs"))
        options = body.get("stream_options")
        self._has_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.get("stream") else "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL_NAME,
        }
        self._sent_text = ""
        self._sent_tokens = 0
        self._has_started = False

    def whole(self, turn: ChatTurn) -> dict[str, Any]:
        message = {**turn.parsed.to_message(), "refusal": None}
        if turn.parsed.calls and not turn.parsed.content:
            message["content"] = None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(sampled_tokens(turn.completion)),
            "finish_reason": turn.finish_reason,
        }
        return {**self._head, "choices": [choice], "usage": _usage(turn)}

    def part(self, part: TurnPart) -> Iterator[bytes]:
        """Chunks for a part of the turn, sent while the rest is sampled."""
        if not self._has_started:
            self._has_started = True
            yield self._chunk({"role": "assistant", "content": ""})
        self._sent_text += part.text
        self._sent_tokens += len(part.tokens)
        yield self._chunk({"content": part.text}, logprobs=self._logprobs(part.tokens))

    def end(self, turn: ChatTurn) -> Iterator[bytes]:
        """What was not sent as parts."""
        if not self._has_started:
            yield self._chunk({"role": "assistant", "content": "" if not turn.parsed.calls else None})
        rest = unsent_text(turn.parsed.content, self._sent_text)
        logprobs = self._logprobs(sampled_tokens(turn.completion)[self._sent_tokens :])
        if rest:
            yield self._chunk({"content": rest}, logprobs=logprobs)
            logprobs = None
        for number, call in enumerate(turn.parsed.calls):
            yield self._chunk({"tool_calls": [{"index": number, **call.to_openai()}]})
        # The logprobs of tool calls and of the end token have no chunk with text.
        yield self._chunk({}, turn.finish_reason, logprobs)
        if self._has_usage:
            yield json_event({**self._head, "choices": [], "usage": _usage(turn)})
        yield DONE

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return json_event({**self._head, "choices": [choice]})

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        """Logprobs of all sampled tokens, including those of tool calls and the end token."""
        return {"content": logprob_entries(tokens, self._token_bytes)} if self._has_logprobs else None


def logprob_entries(tokens: Sequence[SampledToken], token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*other) for other in token.alternatives]}
        for token in tokens
    ]


def openai_error(_status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": kind, "param": param}}


def models() -> dict[str, Any]:
    card = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rollbook"}
    return {"object": "list", "data": [card]}
