"""POST /inference/v1/generate: token ids in, token ids with logprobs and version spans out, in vLLM's shape."""

import msgspec
from aiohttp import web

from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generated
from rollbook.inference.server.routes.replies import json_response
from rollbook.inference.server.service import Ask, PolicyService, require_count
from rollbook.inference.wire.completions import derived_seed, spans
from rollbook.inference.wire.generate import (
    GenerateBody,
    GenerateChoice,
    GenerateLogprobs,
    GenerateReply,
    TokenScore,
)


class GenerateRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode = msgspec.json.Decoder(GenerateBody).decode

    async def generate(self, request: web.Request) -> web.Response:
        body = self._decode(await request.read())
        self._service.model(body.model)
        params = body.sampling_params
        if body.stream:
            raise BadRequestError("stream: /v1/completions streams; this route answers whole", param="stream")
        if params.logprobs not in (None, 0, 1):
            raise BadRequestError("logprobs: only those of the sampled tokens are offered; ask for 0", param="logprobs")
        require_count(params.n, 1)
        eos = self._service.eos_token_ids
        asks = [
            Ask(prompt=body.token_ids, sampling=params.sampling(derived_seed(params.seed, at), eos_token_ids=eos))
            for at in range(params.n)
        ]
        with self._service.generations(
            asks, min_publication=body.min_publication, has_text=False, request_id=body.request_id
        ) as begun:
            ended = [await generation.result() for generation in begun]
        with_logprobs = params.logprobs is not None
        return json_response(
            GenerateReply(
                request_id=body.request_id or self._service.new_id("gen"),
                choices=[_choice(index, end, with_logprobs=with_logprobs) for index, end in enumerate(ended)],
            )
        )


def _choice(index: int, end: Generated, *, with_logprobs: bool) -> GenerateChoice:
    completion = end.completion
    ids = completion.token_ids.tolist()
    scores = [TokenScore(token, logprob) for token, logprob in zip(ids, completion.logprobs.tolist(), strict=True)]
    return GenerateChoice(
        index=index,
        token_ids=ids,
        finish_reason=completion.finish_reason.value,
        logprobs=GenerateLogprobs(content=scores) if with_logprobs else None,
        weight_versions=spans(completion.versions.tolist()),
    )
