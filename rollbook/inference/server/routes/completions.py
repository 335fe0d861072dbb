"""POST /v1/completions: text or token ids in; text, ids, logprobs and version spans out, whole or as a stream."""

import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from rollbook.contracts.policy import Completion, TopLogprobs
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generated, Piece, joined
from rollbook.inference.server.routes.alternatives import top_dicts
from rollbook.inference.server.routes.replies import EventStream, json_response
from rollbook.inference.server.routes.streaming import merged
from rollbook.inference.server.service import Ask, PolicyService, require_count
from rollbook.inference.server.tokenizer import Texts
from rollbook.inference.wire.completions import (
    Choice,
    CompletionBody,
    CompletionReply,
    LogprobsBlock,
    Usage,
    derived_seed,
    spans,
)


class CompletionRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode = msgspec.json.Decoder(CompletionBody).decode

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self._decode(await request.read())
        model = self._service.model(body.model)
        prompts = self._prompts(body)
        asks = self._asks(body, prompts)
        stops = body.stops()
        if stops:
            self._service.require_texts("stop")
        with self._service.generations(
            asks,
            min_publication=body.min_publication,
            stops=stops,
            is_watched=bool(body.stream),
            has_text=body.detokenize or bool(stops),
            request_id=body.request_id,
        ) as begun:
            head = CompletionReply(
                id=self._service.new_id("cmpl"), created=int(time.time()), model=model, choices=[], usage=None
            )
            if not body.stream:
                ended = [await generation.result() for generation in begun]
                return json_response(self._reply(head, body, prompts, ended))
            stream = EventStream(request)
            shapes = [_ChoiceShape(self._service.texts, body) for _ in begun]
            try:
                async with aclosing(merged(begun)) as pieces:
                    async for index, piece, end in pieces:
                        prompt = prompts[index // body.count] if shapes[index].is_first else None
                        choice = shapes[index].of(index, piece, end)
                        choice.prompt_token_ids = prompt if body.return_token_ids else None
                        await stream.send(msgspec.structs.replace(head, choices=[choice]))
            except Exception as error:
                await stream.fail(error)
                return await stream.end()
            if body.stream_options is not None and body.stream_options.include_usage:
                completions = [g.ended.completion for g in begun if g.ended is not None]
                usage = Usage.of(sum(map(len, prompts)), completions, n=body.count)
                await stream.send(msgspec.structs.replace(head, usage=usage, choices=[]))
            return await stream.end()

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        prompts: list[list[int]] = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                prompts.append(self._service.require_texts("prompt").encode_prompt(prompt))
            else:
                prompts.append(prompt)
        return prompts

    def _asks(self, body: CompletionBody, prompts: list[list[int]]) -> list[Ask]:
        refused = body.refused_field()
        if refused is not None:
            raise BadRequestError(f"{refused}: this server does not offer it; leave it out", param=refused)
        require_count(body.count, len(prompts))
        if body.seeds is not None and len(body.seeds) != len(prompts):
            raise BadRequestError(f"seeds: {len(body.seeds)} for {len(prompts)} prompts", param="seeds")
        seeds = body.seeds or [body.seed] * len(prompts)
        most = self._service.engine.max_model_len if body.max_tokens is None else body.max_tokens
        eos = self._service.eos_token_ids
        all_seeds = [derived_seed(seed, at) for seed in seeds for at in range(body.count)]
        samplings = {seed: body.sampling(seed, max_tokens=most, eos_token_ids=eos) for seed in set(all_seeds)}
        return [Ask(prompt=prompts[at // body.count], sampling=samplings[seed]) for at, seed in enumerate(all_seeds)]

    def _reply(
        self, head: CompletionReply, body: CompletionBody, prompts: list[list[int]], ended: Sequence[Generated]
    ) -> CompletionReply:
        texts = self._service.texts if body.detokenize else None
        choices = [choice_of(end, index, body, texts) for index, end in enumerate(ended)]
        if body.return_token_ids and body.detokenize:
            for index, choice in enumerate(choices):
                choice.prompt_token_ids = prompts[index // body.count]
        head.choices = choices
        head.usage = Usage.of(sum(map(len, prompts)), [end.completion for end in ended], n=body.count)
        if any(len(choice.weight_versions) > 1 for choice in choices):
            head.kv_after_update = self._service.engine.stats().kv_after_update.value
        return head


def choice_of(end: Generated, index: int, body: CompletionBody, texts: Texts | None) -> Choice:
    completion = end.completion
    ids = completion.token_ids.tolist()
    return Choice(
        index=index,
        finish_reason=completion.finish_reason.value,
        weight_versions=spans(completion.versions.tolist()),
        token_ids=ids if body.return_token_ids else None,
        logprobs=None if body.logprobs is None else logprobs_block(ids, _exact(completion), texts, 0, completion.tops),
        text=end.text,
        stop_reason=end.stop_reason,
        generation_s=None if completion.generation_s is None else round(completion.generation_s, 4),
    )


def _exact(completion: Completion) -> list[float]:
    logprobs: list[float] = completion.logprobs.tolist()
    return logprobs


def logprobs_block(
    ids: list[int], logprobs: list[float], texts: Texts | None, offset: int, tops: TopLogprobs | None = None
) -> LogprobsBlock:
    """`offset`: where the first of these tokens begins in the text. Without text, alternatives are named by their ids."""
    alternatives = None if tops is None else top_dicts(ids, logprobs, tops, texts)
    if texts is None:
        return LogprobsBlock(token_logprobs=logprobs, top_logprobs=alternatives)
    tokens = [texts.token_bytes(token).decode(errors="replace") for token in ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return LogprobsBlock(token_logprobs=logprobs, tokens=tokens, text_offset=offsets, top_logprobs=alternatives)


class _ChoiceShape:
    """One choice of a stream, piece by piece."""

    def __init__(self, texts: Texts | None, body: CompletionBody) -> None:
        self._texts = texts if body.detokenize else None
        self._body = body
        self._sent = 0
        self._offset = 0
        self.is_first = True

    def of(self, index: int, piece: Piece, end: Generated | None) -> Choice:
        self.is_first = False
        found = spans(piece.versions)
        for span in found:
            span.start += self._sent
            span.end += self._sent
        self._sent += len(piece.token_ids)
        block = None
        if self._body.logprobs is not None:
            tops = joined(piece.tops)
            block = logprobs_block(piece.token_ids, piece.logprobs, self._texts, self._offset, tops)
            self._offset += sum(map(len, block.tokens or ()))
        return Choice(
            index=index,
            finish_reason=None if end is None else end.completion.finish_reason.value,
            weight_versions=found,
            token_ids=piece.token_ids if self._body.return_token_ids else None,
            logprobs=block,
            text=piece.text,
            stop_reason=None if end is None else end.stop_reason,
        )
