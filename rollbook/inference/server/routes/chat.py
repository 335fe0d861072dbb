"""POST /v1/chat/completions: the chat template makes the prompt, and tool calls are parsed from the sampled text."""

import time

import msgspec
from aiohttp import web

from rollbook.access.event_stream import EventStream, json_event
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.output_formats import ToolCall, parse_tool_calls
from rollbook.contracts.policy import Completion, TokenChunk
from rollbook.inference.server.generation import Generation, GenerationChunk, GenerationResult
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.routes.streaming import possible_tokens, stream_completions
from rollbook.inference.server.service import PolicyService
from rollbook.inference.server.text import TextTokenizer, ToolCallStream, token_names
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
    TopLogprob,
)
from rollbook.inference.wire.completions import Usage, version_spans


class ChatRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode = json_decoder(ChatBody).decode_body

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self._decode(await request.read())
        model = self._service.resolve_model(body.model)
        tokenizer = self._service.require_tokenizer("messages")
        prompt = await self._service.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            tools=body.rendered_tools(),
            template=body.template_arguments(),
        )
        samplings = body.samplings(
            [body.seed],
            max_model_len=self._service.engine.max_model_len,
            eos_token_ids=self._service.eos_token_ids,
        )
        grammar = await self._service.compile_grammar(body.grammar())
        with self._service.generations(
            [(prompt, sampling) for sampling in samplings],
            min_publication=body.min_publication,
            stops=body.stops(),
            is_streamed=bool(body.stream),
            skip_special_tokens=body.skip_special_tokens,
            request_id=body.request_id,
            grammar=grammar,
            model=model,
        ) as generations:
            reply_id, created = self._service.new_id("chatcmpl"), int(time.time())
            if body.stream:
                head = ChatChunk(id=reply_id, created=created, model=model, choices=[])
                return await _stream(EventStream(request), generations, body, head, prompt=prompt, tokenizer=tokenizer)
            results = [await generation.result() for generation in generations]
        reply = ChatReply(
            id=reply_id,
            created=created,
            model=model,
            choices=[_choice(index, result, body, tokenizer) for index, result in enumerate(results)],
            usage=Usage.of(len(prompt), [result.completion for result in results], n=body.count),
            prompt_token_ids=prompt if body.return_token_ids else None,
        )
        if any(len(choice.weight_versions) > 1 for choice in reply.choices):
            reply.kv_after_update = self._service.engine.stats().kv_after_update.value
        return json_response(reply)


def _choice(index: int, result: GenerationResult, body: ChatBody, tokenizer: TextTokenizer) -> ChatChoice:
    completion, content, calls = result.completion, result.text, list[ToolCall]()
    if body.rendered_tools():
        content, calls = parse_tool_calls(result.text)
    return ChatChoice(
        index=index,
        message=AssistantMessage(
            content=(content.strip() or None) if calls else content,
            tool_calls=_tool_call_parts(calls) if calls else None,
        ),
        finish_reason="tool_calls" if calls else completion.finish_reason.value,
        weight_versions=version_spans(completion.versions),
        logprobs=_logprobs(completion, body, tokenizer),
        token_ids=completion.token_ids.tolist() if body.return_token_ids else None,
        raw_text=result.text if calls else None,
        stop_reason=result.stop_reason,
    )


def _tool_call_parts(calls: list[ToolCall], *, has_index: bool = False) -> list[ToolCallPart]:
    return [
        ToolCallPart(
            id=call.id,
            function=FunctionCall(name=call.name, arguments=call.arguments),
            index=at if has_index else msgspec.UNSET,
        )
        for at, call in enumerate(calls)
    ]


def _logprobs(sampled: Completion | TokenChunk, body: ChatBody, tokenizer: TextTokenizer) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    name, tops = token_names(tokenizer, is_id=body.return_tokens_as_token_ids), sampled.tops

    def entry(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=name(token), logprob=logprob, bytes=list(tokenizer.token_bytes(token)))

    content = []
    for at, (token, logprob) in enumerate(zip(sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)):
        own = entry(token, logprob)
        alternatives = [entry(*other) for other in possible_tokens(tops, at)] if tops is not None else []
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=alternatives))
    return ChatLogprobs(content=content)


async def _stream(
    stream: EventStream,
    generations: list[Generation],
    body: ChatBody,
    head: ChatChunk,
    *,
    prompt: list[int],
    tokenizer: TextTokenizer,
) -> web.StreamResponse:
    has_tools = bool(body.rendered_tools())
    choices = [_StreamedChoice(body, tokenizer, ToolCallStream() if has_tools else None) for _ in generations]
    first = msgspec.structs.replace(
        head,
        choices=[ChunkChoice(index=at, delta=Delta(role="assistant", content="")) for at in range(len(choices))],
        prompt_token_ids=prompt if body.return_token_ids else None,
    )
    await stream.write(json_event(first))
    return await stream_completions(
        stream,
        generations,
        body,
        prompt_tokens=len(prompt),
        chunk=lambda index, piece: msgspec.structs.replace(head, choices=[choices[index].chunk(index, piece)]),
        usage_chunk=lambda usage: msgspec.structs.replace(head, usage=usage),
    )


class _StreamedChoice:
    def __init__(self, body: ChatBody, tokenizer: TextTokenizer, tools: ToolCallStream | None) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._tools = tools
        self._num_tokens = 0

    def chunk(self, index: int, piece: GenerationChunk) -> ChunkChoice:
        content, calls, result, tokens = piece.text, list[ToolCall](), piece.result, piece.tokens
        if self._tools is not None:
            content = self._tools.feed(piece.text)
            if result is not None:
                rest, calls = self._tools.finish()
                content += rest
        spans = version_spans(tokens.versions, offset=self._num_tokens)
        self._num_tokens += len(tokens.token_ids)
        finish_reason = None
        if result is not None:
            finish_reason = "tool_calls" if calls else result.completion.finish_reason.value
        return ChunkChoice(
            index=index,
            delta=Delta(content=content or None, tool_calls=_tool_call_parts(calls, has_index=True) if calls else None),
            finish_reason=finish_reason,
            logprobs=_logprobs(tokens, self._body, self._tokenizer),
            token_ids=tokens.token_ids.tolist() if self._body.return_token_ids else None,
            weight_versions=spans or None,
            stop_reason=None if result is None else result.stop_reason,
        )
