"""POST /tokenize and /detokenize, GET /tokenizer_info, in the format of vLLM. Evaluation harnesses use the server's tokenizer."""

from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.output_formats import check_chat_size
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.service import SURPLUS_TOKENS, PolicyService


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt. A rendered chat contains its own."""
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class TokenRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decode_text = json_decoder(TokenizeBody).decode_body
        self._decode_tokens = json_decoder(DetokenizeBody).decode_body

    async def tokenize(self, request: web.Request) -> web.Response:
        body = self._decode_text(await request.read())
        self._service.resolve_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        if body.messages is not None:
            check_chat_size(body.messages, body.tools)
            tokens = await self._service.encode_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
                tools=body.tools,
                template=body.chat_template_kwargs,
            )
        else:
            has_special = body.add_special_tokens is not False
            [tokens] = await self._service.encode_texts([body.prompt or ""], add_special_tokens=has_special)
        return json_response(
            {"count": len(tokens), "max_model_len": self._service.engine.max_model_len, "tokens": tokens}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = self._decode_tokens(await request.read())
        self._service.resolve_model(body.model)
        self._service.require_tokenizer("tokens")
        size, most = self._service.engine.vocab_size, self._service.engine.max_model_len + SURPLUS_TOKENS
        if len(body.tokens) > most:
            raise BadRequestError(
                f"tokens: {len(body.tokens)} are too many; at most {most} are allowed", param="tokens"
            )
        for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= token < size:
                raise BadRequestError(f"tokens: {token} is outside the vocabulary of {size}", param="tokens")
        return json_response({"prompt": await self._service.decode_tokens(body.tokens)})

    async def info(self, _request: web.Request) -> web.Response:
        tokenizer = self._service.require_tokenizer("tokenizer_info")
        ends = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_token_ids]
        starts = tokenizer.encode_prompt("")
        return json_response(
            {
                "eos_token": ends[0] if ends else None,
                "bos_token": tokenizer.decode(starts[:1], skip_special_tokens=False) if starts else None,
                "model_max_length": self._service.engine.max_model_len,
                "vocabulary_digest": tokenizer.vocabulary_digest,
            }
        )
