"""POST /v1/completions and /inference/v1/generate: text or token ids in; text, ids, logprobs and version spans out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollbook.access.event_stream import EventStream
from rollbook.contracts.decoding import MAX_VALUES, json_decoder
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams, TopLogprobs, joined_completion
from rollbook.inference.engine import PromptScores
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generation, GenerationChunk, GenerationResult
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.routes.streaming import possible_tokens, stream_completions
from rollbook.inference.server.service import PolicyService
from rollbook.inference.server.text import TokenName, token_id_name, token_names
from rollbook.inference.wire.completions import (
    MSGPACK,
    Choice,
    CompletionBody,
    CompletionReply,
    LogprobsBlock,
    TokenCompletion,
    TokenReply,
    Usage,
    derived_seeds,
    version_spans,
)
from rollbook.inference.wire.generate import (
    GenerateBody,
    GenerateChoice,
    GenerateLogprobs,
    GenerateReply,
    TokenScore,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that its completion starts with."""

    token_ids: list[int]
    text: str
    scores: PromptScores | None


class CompletionRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        # The longest prompt as token ids.
        max_values = max(MAX_VALUES, service.engine.max_model_len + 1024)
        self._decode = partial(json_decoder(CompletionBody).decode_body, max_values=max_values)
        self._decode_generate = partial(json_decoder(GenerateBody).decode_body, max_values=max_values)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self._decode(await request.read())
        model = self._service.resolve_model(body.model)
        given = body.prompts()
        is_msgpack = request.headers.get("Accept") == MSGPACK
        _require_supported(body, num_prompts=len(given), is_msgpack=is_msgpack)
        prompts = await self._encoded(given, body)
        samplings, stops = self._samplings(body, len(prompts)), self._stops(body)
        grammar = await self._service.compile_grammar(body.grammar())
        with self._service.generations(
            [(prompts[at // body.count], sampling) for at, sampling in enumerate(samplings)],
            min_publication=body.min_publication,
            stops=stops,
            is_streamed=bool(body.stream),
            has_text=body.detokenize or bool(stops),
            skip_special_tokens=body.skip_special_tokens,
            request_id=body.request_id,
            grammar=grammar,
            model=model,
        ) as generations:
            head = CompletionReply(
                id=self._service.new_id("cmpl"), created=int(time.time()), model=model, choices=[], usage=None
            )
            echoes = await self._echoes(body, prompts)
            if body.stream:
                return await self._stream(EventStream(request), generations, body, head, prompts=prompts, echoes=echoes)
            results = await self._results(generations, num_empty=len(prompts) * body.count)
        if is_msgpack:
            arrays = TokenReply(completions=[TokenCompletion.of(result.completion) for result in results])
            return web.Response(body=msgspec.msgpack.encode(arrays), content_type=MSGPACK)
        return json_response(self._reply(head, body, prompts, echoes, results))

    def _samplings(self, body: CompletionBody, num_prompts: int) -> list[SamplingParams]:
        """One for each completion; none if the request only scores its prompts."""
        seeds = body.seeds or [body.seed] * num_prompts
        if body.is_score_only:
            derived_seeds(seeds, body.count)  # refuses too many completions
            return []
        return body.samplings(
            seeds, max_model_len=self._service.engine.max_model_len, eos_token_ids=self._service.eos_token_ids
        )

    def _stops(self, body: CompletionBody) -> tuple[str, ...]:
        stops = body.stops()
        if stops:
            self._service.require_tokenizer("stop")
        return stops

    async def _stream(
        self,
        stream: EventStream,
        generations: Sequence[Generation],
        body: CompletionBody,
        head: CompletionReply,
        *,
        prompts: Sequence[list[int]],
        echoes: Sequence[EchoedPrompt | None],
    ) -> web.StreamResponse:
        name = self._names(body)
        choices = [
            _StreamedChoice(name, body, prompt=prompts[at // body.count], echo=echoes[at // body.count])
            for at in range(len(generations))
        ]

        def chunk(index: int, piece: GenerationChunk) -> CompletionReply:
            return msgspec.structs.replace(head, choices=[choices[index].chunk(index, piece)])

        return await stream_completions(
            stream,
            generations,
            body,
            prompt_tokens=sum(map(len, prompts)),
            chunk=chunk,
            usage_chunk=lambda usage: msgspec.structs.replace(head, usage=usage),
        )

    async def _encoded(self, given: list[str] | list[list[int]], body: CompletionBody) -> list[list[int]]:
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in given if isinstance(prompt, list)]
        return await self._service.encode_texts(texts, add_special_tokens=body.add_special_tokens is not False)

    def _names(self, body: CompletionBody) -> TokenName | None:
        """None: no text."""
        tokenizer = self._service.tokenizer
        if tokenizer is None or not body.detokenize:
            return None
        return token_names(tokenizer, is_id=body.return_tokens_as_token_ids)

    async def _echoes(self, body: CompletionBody, prompts: list[list[int]]) -> list[EchoedPrompt | None]:
        """One for each prompt; None if the prompt is not requested."""
        if not body.echo:
            return [None] * len(prompts)
        tokenizer = self._service.tokenizer if body.detokenize else None
        echoes: list[EchoedPrompt | None] = []
        for source, prompt in zip(body.prompts(), prompts, strict=True):
            scores = None
            if body.logprobs is not None:
                scores = await self._service.engine.score(
                    prompt, top_logprobs=body.num_top_logprobs(), adapter=self._service.adapter_of(body.model)
                )
            text = "" if tokenizer is None else source if isinstance(source, str) else tokenizer.decode(prompt)
            echoes.append(EchoedPrompt(token_ids=prompt, text=text, scores=scores))
        return echoes

    async def _results(self, generations: Sequence[Generation], *, num_empty: int) -> list[GenerationResult]:
        """The results of the generations; empty ones if the request only scores its prompts."""
        if generations:
            return [await generation.result() for generation in generations]
        empty = joined_completion([], FinishReason.LENGTH)
        return [GenerationResult(completion=empty, text="")] * num_empty

    async def generate(self, request: web.Request) -> web.Response:
        body = self._decode_generate(await request.read())
        model = self._service.resolve_model(body.model)
        params = body.sampling_params
        if body.stream:
            raise BadRequestError("stream: not supported by this route; use /v1/completions", param="stream")
        if params.logprobs not in (None, 0, 1):
            raise BadRequestError(
                "logprobs: only those of the sampled tokens are supported; request 0", param="logprobs"
            )
        structured = params.structured_outputs
        grammar = await self._service.compile_grammar(
            None if structured is None else (structured.to_grammar(), "structured_outputs")
        )
        with self._service.generations(
            [(body.token_ids, sampling) for sampling in params.samplings(self._service.eos_token_ids)],
            min_publication=body.min_publication,
            has_text=False,
            request_id=body.request_id,
            grammar=grammar,
            model=model,
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
        self,
        head: CompletionReply,
        body: CompletionBody,
        prompts: list[list[int]],
        echoes: Sequence[EchoedPrompt | None],
        results: Sequence[GenerationResult],
    ) -> CompletionReply:
        name = self._names(body)
        choices = [
            completion_choice(result, index, body, name, echoes[index // body.count])
            for index, result in enumerate(results)
        ]
        if body.return_token_ids and body.detokenize:
            for index, choice in enumerate(choices):
                choice.prompt_token_ids = prompts[index // body.count]
        head.choices = choices
        head.usage = Usage.of(sum(map(len, prompts)), [result.completion for result in results], n=body.count)
        if any(len(choice.weight_versions) > 1 for choice in choices):
            head.kv_after_update = self._service.engine.stats().kv_after_update.value
        return head


def _require_supported(body: CompletionBody, *, num_prompts: int, is_msgpack: bool) -> None:
    """Raises `BadRequestError` for fields that do not go together, `ValueError` for too many completions."""
    derived_seeds([None] * num_prompts, body.count)
    if body.seeds is not None and len(body.seeds) != num_prompts:
        raise BadRequestError(f"seeds: {len(body.seeds)} for {num_prompts} prompts", param="seeds")
    if body.echo and is_msgpack:
        raise BadRequestError("echo: not available as msgpack; request JSON", param="echo")
    if body.is_score_only and body.stream:
        raise BadRequestError("stream: max_tokens 0 has no tokens to stream", param="stream")


def completion_choice(
    result: GenerationResult,
    index: int,
    body: CompletionBody,
    name: TokenName | None,
    echo: EchoedPrompt | None,
) -> Choice:
    completion = result.completion
    block = None
    if body.logprobs is not None:
        block = _block_after(
            echo, completion.token_ids, completion.logprobs, completion.tops, name, has_tops=bool(body.logprobs)
        )
    return Choice(
        index=index,
        finish_reason=completion.finish_reason.value,
        weight_versions=version_spans(completion.versions),
        token_ids=completion.token_ids.tolist() if body.return_token_ids else None,
        logprobs=block,
        text=result.text if echo is None else echo.text + result.text,
        stop_reason=result.stop_reason,
        generation_s=None if completion.generation_s is None else round(completion.generation_s, 4),
    )


class _StreamedChoice:
    def __init__(
        self, name: TokenName | None, body: CompletionBody, *, prompt: list[int], echo: EchoedPrompt | None
    ) -> None:
        self._name = name
        self._prompt = prompt
        self._echo = echo
        self._body = body
        self._num_tokens = 0
        self._text_offset = 0
        self._is_first = True

    def chunk(self, index: int, piece: GenerationChunk) -> Choice:
        tokens, result = piece.tokens, piece.result
        echo = self._echo if self._is_first else None
        block = None
        if self._body.logprobs is not None:
            block = _block_after(
                echo,
                tokens.token_ids,
                tokens.logprobs,
                tokens.tops,
                self._name,
                text_offset=self._text_offset,
                has_tops=bool(self._body.logprobs),
            )
            self._text_offset += sum(map(len, block.tokens or ()))
        choice = Choice(
            index=index,
            finish_reason=None if result is None else result.completion.finish_reason.value,
            weight_versions=version_spans(tokens.versions, offset=self._num_tokens),
            token_ids=tokens.token_ids.tolist() if self._body.return_token_ids else None,
            logprobs=block,
            text=piece.text if echo is None else echo.text + piece.text,
            stop_reason=None if result is None else result.stop_reason,
            prompt_token_ids=self._prompt if self._body.return_token_ids and self._is_first else None,
        )
        self._num_tokens += len(tokens.token_ids)
        self._is_first = False
        return choice


def _block_after(
    echo: EchoedPrompt | None,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    tops: TopLogprobs | None,
    name: TokenName | None,
    *,
    text_offset: int = 0,
    has_tops: bool,
) -> LogprobsBlock:
    """The block of sampled tokens, after that of an echoed prompt. The first token of a prompt has no logprob."""
    if echo is None or echo.scores is None:
        return _logprobs_block(token_ids, logprobs, tops, name, text_offset=text_offset)
    first, scores = (name or token_id_name)(echo.token_ids[0]), echo.scores
    start, text_offset = text_offset, text_offset + len(first)
    rest = np.array(echo.token_ids[1:], dtype=np.int32)
    prompt = _logprobs_block(rest, scores.logprobs, scores.tops, name, text_offset=text_offset)
    text_offset += sum(map(len, prompt.tokens or ()))
    sampled = _logprobs_block(token_ids, logprobs, tops, name, text_offset=text_offset)
    is_text = name is not None
    return LogprobsBlock(
        token_logprobs=[None, *prompt.token_logprobs, *sampled.token_logprobs],
        tokens=[first, *(prompt.tokens or ()), *(sampled.tokens or ())] if is_text else None,
        text_offset=[start, *(prompt.text_offset or ()), *(sampled.text_offset or ())] if is_text else None,
        top_logprobs=[None, *(prompt.top_logprobs or ()), *(sampled.top_logprobs or ())] if has_tops else None,
        prompt_version=scores.publication,
    )


def _logprobs_block(
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    tops: TopLogprobs | None,
    name: TokenName | None,
    *,
    text_offset: int,
) -> LogprobsBlock:
    """`text_offset`: where the first of these tokens starts in the text."""
    values: list[float | None] = logprobs.tolist()
    alternatives: list[dict[str, float] | None] | None = None
    if tops is not None:
        sampled = enumerate(zip(token_ids.tolist(), logprobs.tolist(), strict=True))
        alternatives = [_alternatives(tops, at, token, value, name) for at, (token, value) in sampled]
    if name is None:
        return LogprobsBlock(token_logprobs=values, top_logprobs=alternatives)
    tokens = [name(token) for token in token_ids.tolist()]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return LogprobsBlock(token_logprobs=values, tokens=tokens, text_offset=offsets, top_logprobs=alternatives)


def _alternatives(tops: TopLogprobs, at: int, sampled: int, logprob: float, name: TokenName | None) -> dict[str, float]:
    """Text to logprob. The sampled token is always included, so there may be one more than requested."""
    by_token = dict(possible_tokens(tops, at))
    by_token.setdefault(sampled, logprob)
    by_text: dict[str, float] = {}
    for token, value in by_token.items():
        # Tokens that are parts of a character may have the same text. They are sorted, so the most likely one is kept.
        by_text.setdefault((name or token_id_name)(token), value)
    return by_text


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
