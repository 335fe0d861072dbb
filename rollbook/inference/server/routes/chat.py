"""POST /v1/chat/completions: the chat template makes the prompt; tool calls are taken out of what the model wrote."""

import time
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.policy import TopLogprobs
from rollbook.contracts.tool_calls import ToolCall, parse_tool_calls
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generated, Generation, Piece, joined
from rollbook.inference.server.routes.alternatives import top_list
from rollbook.inference.server.routes.replies import EventStream, json_response
from rollbook.inference.server.routes.streaming import merged
from rollbook.inference.server.service import Ask, PolicyService, require_count
from rollbook.inference.server.tokenizer import Texts
from rollbook.inference.server.tool_calls import ToolCallText
from rollbook.inference.wire.chat import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatReply,
    ChunkChoice,
    Delta,
    FunctionCall,
    TokenLogprob,
    ToolCallPart,
)
from rollbook.inference.wire.completions import Usage, derived_seed, spans


class ChatRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode = msgspec.json.Decoder(ChatBody).decode

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self._decode(await request.read())
        model = self._service.model(body.model)
        texts = self._service.require_texts("messages")
        prompt = self._prompt(body, texts)
        with self._service.generations(
            self._asks(body, prompt),
            min_publication=body.min_publication,
            stops=body.stops(),
            is_watched=bool(body.stream),
            request_id=body.request_id,
        ) as begun:
            reply_id, created = self._service.new_id("chatcmpl"), int(time.time())
            if body.stream:
                head = ChatChunk(id=reply_id, created=created, model=model, choices=[])
                return await _ChatStream(body, texts, head, prompt).send(begun, EventStream(request))
            ended = [await generation.result() for generation in begun]
            reply = ChatReply(
                id=reply_id,
                created=created,
                model=model,
                choices=[_choice(index, end, body, texts, reply_id) for index, end in enumerate(ended)],
                usage=Usage.of(len(prompt), [end.completion for end in ended], n=body.count),
                prompt_token_ids=prompt if body.return_token_ids else None,
            )
            if any(len(choice.weight_versions) > 1 for choice in reply.choices):
                reply.kv_after_update = self._service.engine.stats().kv_after_update.value
            return json_response(reply)

    def _prompt(self, body: ChatBody, texts: Texts) -> list[int]:
        if not body.messages:
            raise BadRequestError("messages: it is empty; at least one message is needed", param="messages")
        messages = [_plain(message, at) for at, message in enumerate(body.messages)]
        tools = body.rendered_tools()
        rendered = texts.render(messages, add_generation_prompt=body.add_generation_prompt, tools=tools or None)
        return texts.encode(rendered)

    def _asks(self, body: ChatBody, prompt: list[int]) -> list[Ask]:
        refused = body.refused_field()
        if refused is not None:
            raise BadRequestError(f"{refused}: this server does not offer it; leave it out", param=refused)
        require_count(body.count, 1)
        limit = body.limit()
        most = self._service.engine.max_model_len if limit is None else limit
        eos = self._service.eos_token_ids
        return [
            Ask(
                prompt=prompt,
                sampling=body.sampling(derived_seed(body.seed, at), max_tokens=most, eos_token_ids=eos),
            )
            for at in range(body.count)
        ]


def _plain(message: dict[str, Any], at: int) -> dict[str, Any]:
    """Content given in parts becomes one text; tool calls' arguments become objects, which is what templates expect."""
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"messages: number {at} has no role", param="messages")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise BadRequestError(f"messages: number {at} holds parts that are not text", param="messages")
        plain["content"] = "".join(str(part.get("text", "")) for part in content)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise BadRequestError(f"messages: the content of number {at} is no text", param="messages")
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, at) for call in calls]
    return plain


def _plain_call(call: Any, at: int) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = msgspec.json.decode(function["arguments"] or "{}")
    except (TypeError, KeyError, msgspec.MsgspecError) as error:
        raise BadRequestError(
            f"messages: a tool call of number {at} cannot be read: {error}", param="messages"
        ) from error
    return {**call, "function": function}


def _parts(calls: list[ToolCall], reply_id: str, index: int, *, is_stream: bool = False) -> list[ToolCallPart]:
    return [
        ToolCallPart(
            id=f"call-{reply_id}-{index}-{at}",
            function=FunctionCall(name=call.name, arguments=call.arguments),
            index=at if is_stream else msgspec.UNSET,
        )
        for at, call in enumerate(calls)
    ]


def _choice(index: int, end: Generated, body: ChatBody, texts: Texts, reply_id: str) -> ChatChoice:
    completion, content, calls = end.completion, end.text, list[ToolCall]()
    if body.rendered_tools():
        content, calls = parse_tool_calls(end.text)
    ids = completion.token_ids.tolist()
    return ChatChoice(
        index=index,
        message=AssistantMessage(
            content=(content.strip() or None) if calls else content,
            tool_calls=_parts(calls, reply_id, index) if calls else None,
        ),
        finish_reason="tool_calls" if calls else completion.finish_reason.value,
        weight_versions=spans(completion.versions.tolist()),
        logprobs=_logprobs(ids, completion.logprobs.tolist(), texts, completion.tops) if body.logprobs else None,
        token_ids=ids if body.return_token_ids else None,
        raw_text=end.text if calls else None,
        stop_reason=end.stop_reason,
    )


def _logprobs(ids: list[int], logprobs: list[float], texts: Texts, tops: TopLogprobs | None) -> ChatLogprobs:
    content = []
    for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        raw = texts.token_bytes(token)
        content.append(
            TokenLogprob(
                token=raw.decode(errors="replace"),
                logprob=logprob,
                bytes=list(raw),
                top_logprobs=[] if tops is None else top_list(tops, at, texts),
            )
        )
    return ChatLogprobs(content=content)


class _ChatStream:
    """One answer as chunks. Where tools were offered, text from the first call on is held until it can be read."""

    def __init__(self, body: ChatBody, texts: Texts, head: ChatChunk, prompt: list[int]) -> None:
        self._body = body
        self._texts = texts
        self._head = head
        self._prompt = prompt

    async def send(self, begun: list[Generation], stream: EventStream) -> web.StreamResponse:
        tools = [ToolCallText() if self._body.rendered_tools() else None for _ in begun]
        sent = [0] * len(begun)
        try:
            first = msgspec.structs.replace(
                self._head,
                choices=[ChunkChoice(index=at, delta=Delta(role="assistant", content="")) for at in range(len(begun))],
                prompt_token_ids=self._prompt if self._body.return_token_ids else None,
            )
            await stream.send(first)
            async with aclosing(merged(begun)) as pieces:
                async for index, piece, end in pieces:
                    choice = self._choice(index, piece, end, tools[index], sent[index])
                    sent[index] += len(piece.token_ids)
                    await stream.send(msgspec.structs.replace(self._head, choices=[choice]))
        except Exception as error:
            await stream.fail(error)
            return await stream.end()
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            ended = [generation.ended.completion for generation in begun if generation.ended is not None]
            usage = Usage.of(len(self._prompt), ended, n=self._body.count)
            await stream.send(msgspec.structs.replace(self._head, usage=usage))
        return await stream.end()

    def _choice(
        self, index: int, piece: Piece, end: Generated | None, tools: ToolCallText | None, sent: int
    ) -> ChunkChoice:
        content, calls = piece.text, list[ToolCall]()
        if tools is not None:
            content = tools.feed(piece.text)
            if end is not None:
                rest, calls = tools.finish()
                content += rest
        found = spans(piece.versions)
        for span in found:
            span.start += sent
            span.end += sent
        reason = None if end is None else ("tool_calls" if calls else end.completion.finish_reason.value)
        return ChunkChoice(
            index=index,
            delta=Delta(
                content=content or None,
                tool_calls=_parts(calls, self._head.id, index, is_stream=True) if calls else None,
            ),
            finish_reason=reason,
            logprobs=_logprobs(piece.token_ids, piece.logprobs, self._texts, joined(piece.tops))
            if self._body.logprobs
            else None,
            token_ids=piece.token_ids if self._body.return_token_ids else None,
            weight_versions=found if piece.token_ids else None,
            stop_reason=None if end is None else end.stop_reason,
        )
