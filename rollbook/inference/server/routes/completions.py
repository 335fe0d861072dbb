"""POST /v1/completions and /inference/v1/generate: text or token ids in; text, ids, logprobs and version spans out."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollbook.contracts.policy import Completion, TopLogprobs
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import GenerationResult, Piece
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.routes.streaming import EventStream, possible_tokens, stream_completions
from rollbook.inference.server.service import PolicyService
from rollbook.inference.server.text import Tokenizer
from rollbook.inference.wire.completions import (
    MSGPACK,
    Choice,
    CompletionBody,
    CompletionReply,
    LogprobsBlock,
    TokenCompletion,
    TokenReply,
    Usage,
    version_spans,
)
from rollbook.inference.wire.generate import (
    GenerateBody,
    GenerateChoice,
    GenerateLogprobs,
    GenerateReply,
    TokenScore,
)


class CompletionRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode = msgspec.json.Decoder(CompletionBody).decode
        self._decode_generate = msgspec.json.Decoder(GenerateBody).decode

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self._decode(await request.read())
        model = self._service.resolve_model(body.model)
        prompts = [
            self._service.require_tokenizer("prompt").encode_prompt(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        if body.seeds is not None and len(body.seeds) != len(prompts):
            raise BadRequestError(f"seeds: {len(body.seeds)} for {len(prompts)} prompts", param="seeds")
        samplings = body.samplings(
            body.seeds or [body.seed] * len(prompts),
            max_model_len=self._service.engine.max_model_len,
            eos_token_ids=self._service.eos_token_ids,
        )
        stops = body.stops()
        if stops:
            self._service.require_tokenizer("stop")
        with self._service.generations(
            [(prompts[at // body.count], sampling) for at, sampling in enumerate(samplings)],
            min_publication=body.min_publication,
            stops=stops,
            is_streamed=bool(body.stream),
            has_text=body.detokenize or bool(stops),
            request_id=body.request_id,
        ) as generations:
            head = CompletionReply(
                id=self._service.new_id("cmpl"), created=int(time.time()), model=model, choices=[], usage=None
            )
            if body.stream:
                choices = [_StreamedChoice(self._service.tokenizer, body) for _ in generations]

                def chunk(index: int, piece: Piece) -> CompletionReply:
                    choice = choices[index].chunk(index, piece, prompts[index // body.count])
                    return msgspec.structs.replace(head, choices=[choice])

                return await stream_completions(
                    EventStream(request),
                    generations,
                    body,
                    prompt_tokens=sum(map(len, prompts)),
                    chunk=chunk,
                    usage_chunk=lambda usage: msgspec.structs.replace(head, usage=usage),
                )
            results = [await generation.result() for generation in generations]
        if request.headers.get("Accept") == MSGPACK:
            arrays = TokenReply(completions=[TokenCompletion.of(result.completion) for result in results])
            return web.Response(body=msgspec.msgpack.encode(arrays), content_type=MSGPACK)
        return json_response(self._reply(head, body, prompts, results))

    async def generate(self, request: web.Request) -> web.Response:
        body = self._decode_generate(await request.read())
        self._service.resolve_model(body.model)
        params = body.sampling_params
        if body.stream:
            raise BadRequestError("stream: not supported by this route; use /v1/completions", param="stream")
        if params.logprobs not in (None, 0, 1):
            raise BadRequestError(
                "logprobs: only those of the sampled tokens are supported; request 0", param="logprobs"
            )
        with self._service.generations(
            [(body.token_ids, sampling) for sampling in params.samplings(self._service.eos_token_ids)],
            min_publication=body.min_publication,
            has_text=False,
            request_id=body.request_id,
        ) as generations:
            completions = [(await generation.result()).completion for generation in generations]
        has_logprobs = params.logprobs is not None
        return json_response(
            GenerateReply(
                request_id=body.request_id or self._service.new_id("gen"),
                choices=[
                    _generate_choice(index, done, has_logprobs=has_logprobs) for index, done in enumerate(completions)
                ],
            )
        )

    def _reply(
        self, head: CompletionReply, body: CompletionBody, prompts: list[list[int]], results: Sequence[GenerationResult]
    ) -> CompletionReply:
        tokenizer = self._service.tokenizer if body.detokenize else None
        choices = [completion_choice(result, index, body, tokenizer) for index, result in enumerate(results)]
        if body.return_token_ids and body.detokenize:
            for index, choice in enumerate(choices):
                choice.prompt_token_ids = prompts[index // body.count]
        head.choices = choices
        head.usage = Usage.of(sum(map(len, prompts)), [result.completion for result in results], n=body.count)
        if any(len(choice.weight_versions) > 1 for choice in choices):
            head.kv_after_update = self._service.engine.stats().kv_after_update.value
        return head


def completion_choice(
    result: GenerationResult, index: int, body: CompletionBody, tokenizer: Tokenizer | None
) -> Choice:
    completion = result.completion
    return Choice(
        index=index,
        finish_reason=completion.finish_reason.value,
        weight_versions=version_spans(completion.versions),
        token_ids=completion.token_ids.tolist() if body.return_token_ids else None,
        logprobs=None
        if body.logprobs is None
        else _logprobs_block(completion.token_ids, completion.logprobs, completion.tops, tokenizer, text_offset=0),
        text=result.text,
        stop_reason=result.stop_reason,
        generation_s=None if completion.generation_s is None else round(completion.generation_s, 4),
    )


class _StreamedChoice:
    def __init__(self, tokenizer: Tokenizer | None, body: CompletionBody) -> None:
        self._tokenizer = tokenizer if body.detokenize else None
        self._body = body
        self._num_tokens = 0
        self._text_offset = 0
        self._is_first = True

    def chunk(self, index: int, piece: Piece, prompt: list[int]) -> Choice:
        tokens, result = piece.tokens, piece.result
        block = None
        if self._body.logprobs is not None:
            block = _logprobs_block(
                tokens.token_ids, tokens.logprobs, tokens.tops, self._tokenizer, text_offset=self._text_offset
            )
            self._text_offset += sum(map(len, block.tokens or ()))
        choice = Choice(
            index=index,
            finish_reason=None if result is None else result.completion.finish_reason.value,
            weight_versions=version_spans(tokens.versions, offset=self._num_tokens),
            token_ids=tokens.token_ids.tolist() if self._body.return_token_ids else None,
            logprobs=block,
            text=piece.text,
            stop_reason=None if result is None else result.stop_reason,
            prompt_token_ids=prompt if self._body.return_token_ids and self._is_first else None,
        )
        self._num_tokens += len(tokens.token_ids)
        self._is_first = False
        return choice


def _logprobs_block(
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    tops: TopLogprobs | None,
    tokenizer: Tokenizer | None,
    *,
    text_offset: int,
) -> LogprobsBlock:
    """`text_offset`: where the first of these tokens starts in the text."""
    values = logprobs.tolist()
    alternatives = None
    if tops is not None:
        sampled = enumerate(zip(token_ids.tolist(), values, strict=True))
        alternatives = [_alternatives(tops, at, token, value, tokenizer) for at, (token, value) in sampled]
    if tokenizer is None:
        return LogprobsBlock(token_logprobs=values, top_logprobs=alternatives)
    tokens = [_token_text(token, tokenizer) for token in token_ids.tolist()]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return LogprobsBlock(token_logprobs=values, tokens=tokens, text_offset=offsets, top_logprobs=alternatives)


def _alternatives(
    tops: TopLogprobs, at: int, sampled: int, logprob: float, tokenizer: Tokenizer | None
) -> dict[str, float]:
    """Text to logprob. The sampled token is always included, so there may be one more than requested."""
    by_token = dict(possible_tokens(tops, at))
    by_token.setdefault(sampled, logprob)
    by_text: dict[str, float] = {}
    for token, value in by_token.items():
        # Tokens that are parts of a character may have the same text. They are sorted, so the most likely one is kept.
        by_text.setdefault(_token_text(token, tokenizer), value)
    return by_text


def _token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Without a tokenizer, the id in vLLM's format."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode(errors="replace")


def _generate_choice(index: int, completion: Completion, *, has_logprobs: bool) -> GenerateChoice:
    ids = completion.token_ids.tolist()
    scores = [TokenScore(token, logprob) for token, logprob in zip(ids, completion.logprobs.tolist(), strict=True)]
    return GenerateChoice(
        index=index,
        token_ids=ids,
        finish_reason=completion.finish_reason.value,
        logprobs=GenerateLogprobs(content=scores) if has_logprobs else None,
        weight_versions=version_spans(completion.versions),
    )
