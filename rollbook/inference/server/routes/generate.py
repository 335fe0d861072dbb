"""POST /inference/v1/generate: token ids in, token ids with logprobs and version spans out, in vLLM's format."""

import msgspec
from aiohttp import web

from rollbook.contracts.policy import Completion
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.service import PolicyService
from rollbook.inference.wire.completions import version_spans
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
                choices=[_choice(index, done, has_logprobs=has_logprobs) for index, done in enumerate(completions)],
            )
        )


def _choice(index: int, completion: Completion, *, has_logprobs: bool) -> GenerateChoice:
    ids = completion.token_ids.tolist()
    scores = [TokenScore(token, logprob) for token, logprob in zip(ids, completion.logprobs.tolist(), strict=True)]
    return GenerateChoice(
        index=index,
        token_ids=ids,
        finish_reason=completion.finish_reason.value,
        logprobs=GenerateLogprobs(content=scores) if has_logprobs else None,
        weight_versions=version_spans(completion.versions),
    )
