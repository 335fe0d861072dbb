"""HTTP over one engine: parse, ask the engine, reply. Routes and errors are those of vLLM where vLLM has them."""

import asyncio
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import (
    Engine,
    GenerationError,
    QueueFullError,
    UnpublishedError,
    WeightsError,
)
from rollbook.inference.gate import OutdatedUpdateError, PauseMode
from rollbook.inference.request import BadRequestError
from rollbook.inference.wire import (
    GENERATION_FAILED,
    OUTDATED_UPDATE,
    QUEUE_FULL,
    STALE_WEIGHTS,
    CompletionBody,
    CompletionReply,
    ErrorDetail,
    ErrorReply,
    Health,
    UpdateBody,
    Usage,
    WeightInfo,
    choice_of,
)

MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million tokens fits; an endless body does not."""
MAX_CHOICES = 1024
"""Completions of one request at most: prompts times n."""
RETRY_STALE_S = 0.1
"""Weights arrive within a training step; asking again sooner only costs."""
MODEL_NAME = "policy"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PolicyService:
    """The routes. One of it a process."""

    def __init__(self, engine: Engine, config: InferenceConfig) -> None:
        self._engine = engine
        self._config = config
        self._boot = uuid.uuid4().hex[:12]
        self._count = 0
        self._decode_completion = msgspec.json.Decoder(CompletionBody).decode
        self._decode_update = msgspec.json.Decoder(UpdateBody).decode

    async def completions(self, request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            body = self._decode_completion(raw)
            prompts = body.prompts()
            self._require_sane(body, len(prompts))
            seeds = body.seeds or [body.seed] * len(prompts)
            samplings = {seed: body.sampling(seed) for seed in set(seeds)}
        except (msgspec.MsgspecError, ValueError) as error:
            return _bad_request(error)
        publication = self._engine.publication
        if publication is None or publication.id < body.min_publication:
            have = "none" if publication is None else str(publication.id)
            message = f"weights of publication {body.min_publication} or newer were asked for, this server has {have}"
            return error_response(503, STALE_WEIGHTS, message, retry_after_s=RETRY_STALE_S)
        if self._engine.stats().queued + len(prompts) * body.n > self._config.max_queued:
            message = f"{self._config.max_queued} requests may wait at most; try again later"
            return error_response(503, QUEUE_FULL, message, retry_after_s=RETRY_STALE_S)
        answers: list[asyncio.Future[Completion]] = []
        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                answers.extend(self._engine.submit(prompt, samplings[seed]) for _ in range(body.n))
            completions = [await answer for answer in answers]
        finally:
            _abandon(answers)
        return self._reply(body, prompts, completions)

    def _require_sane(self, body: CompletionBody, num_prompts: int) -> None:
        refused = body.refused_field()
        if refused is not None:
            raise ValueError(f"{refused}: this server does not offer it; leave it out")
        if body.n < 1 or body.n * num_prompts > MAX_CHOICES:
            raise ValueError(
                f"n: {body.n} for {num_prompts} prompts; 1 to {MAX_CHOICES} completions a request are possible"
            )
        if body.seeds is not None and len(body.seeds) != num_prompts:
            raise ValueError(f"seeds: {len(body.seeds)} for {num_prompts} prompts")
        if body.n > 1 and (body.seed is not None or body.seeds is not None):
            raise ValueError("seed: with n > 1 every completion would be the same; send one request for each seed")

    def _reply(self, body: CompletionBody, prompts: list[list[int]], completions: list[Completion]) -> web.Response:
        self._count += 1
        asked = sum(map(len, prompts))
        sampled = sum(len(completion.token_ids) for completion in completions)
        reply = CompletionReply(
            id=f"cmpl-{self._boot}-{self._count}",
            created=int(time.time()),
            model=body.model or MODEL_NAME,
            choices=[
                choice_of(completion, index, with_ids=body.return_token_ids, with_logprobs=body.logprobs is not None)
                for index, completion in enumerate(completions)
            ],
            usage=Usage(prompt_tokens=asked, completion_tokens=sampled, total_tokens=asked + sampled),
        )
        return json_response(reply)

    async def health(self, _request: web.Request) -> web.Response:
        stats, weights = self._engine.stats(), WeightInfo.of(self._engine.publication)
        return json_response(
            Health(
                status="ok",
                publication=weights.publication,
                step=weights.step,
                epoch=weights.epoch,
                digest=weights.digest,
                running=stats.running,
                queued=stats.queued,
                is_paused=self._engine.is_paused,
            )
        )

    async def models(self, _request: web.Request) -> web.Response:
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "owned_by": "rollbook",
            "max_model_len": self._engine.max_model_len,
            "vocab_size": self._engine.vocab_size,
        }
        return json_response({"object": "list", "data": [card]})

    async def pause(self, request: web.Request) -> web.Response:
        asked = request.query.get("mode", PauseMode.ABORT.value)
        try:
            mode = PauseMode(asked)
        except ValueError:
            return error_response(400, "BadRequestError", f"mode: {asked!r} is none of keep, wait, abort", param="mode")
        await self._engine.pause(mode)
        return json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        await self._engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _request: web.Request) -> web.Response:
        return json_response({"is_paused": self._engine.is_paused})

    async def update_weights(self, request: web.Request) -> web.Response:
        try:
            info = self._decode_update(await request.read()).update_info
        except (msgspec.MsgspecError, ValueError) as error:
            return _bad_request(error)
        # Shielded: a trainer that hangs up in the middle must find the update either done or not begun.
        await asyncio.shield(self._engine.load_weights(info.to_contract(), Path(info.path)))
        return json_response({"message": "Weights updated"})

    async def weight_info(self, _request: web.Request) -> web.Response:
        return json_response(WeightInfo.of(self._engine.publication))


def build_app(engine: Engine, config: InferenceConfig) -> web.Application:
    """The server over an open engine. Run it with `handler_cancellation=True`, as `serve` does: who leaves frees its slot."""
    service = PolicyService(engine, config)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app.router.add_post("/v1/completions", service.completions)
    app.router.add_get("/health", service.health)
    app.router.add_get("/v1/models", service.models)
    app.router.add_post("/pause", service.pause)
    app.router.add_post("/resume", service.resume)
    app.router.add_get("/is_paused", service.is_paused)
    app.router.add_post("/update_weights", service.update_weights)
    app.router.add_get("/weight_info", service.weight_info)
    return app


@asynccontextmanager
async def serve(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> AsyncIterator[str]:
    """Listen, and give the URL. `sock`: a socket that somebody else holds open, so that a restarted server keeps its address."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site: web.BaseSite = (
            web.TCPSite(runner, host, port, reuse_address=True) if sock is None else web.SockSite(runner, sock)
        )
        await site.start()
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"http://{bound_host}:{bound_port}"
    finally:
        await runner.cleanup()


def _abandon(answers: list[asyncio.Future[Completion]]) -> None:
    """The client left, or one of several failed: the others free their slots. What is answered already stays as it is."""
    for answer in answers:
        if not answer.cancel() and not answer.cancelled():
            answer.exception()  # seen: a second failure of the same request is not a lost error


def json_response(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(
    status: int, kind: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> web.Response:
    detail = ErrorDetail(message=message, type=kind, code=status, param=param)
    response = json_response(ErrorReply(error=detail), status=status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = f"{retry_after_s:g}"
    return response


def _bad_request(error: Exception) -> web.Response:
    """Names the field: msgspec says `$.field`, our own messages begin with it."""
    message = str(error)
    found = re.search(r"\$\.(?:update_info\.)?(\w+)|field `(\w+)`|^(\w+)\b(?: is|:)", message)
    param = next((name for name in found.groups() if name), None) if found else None
    return error_response(400, "BadRequestError", message, param=param)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in vLLM's shape; the class decides the status."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return error_response(400, "BadRequestError", str(error), param=error.param)
    except WeightsError as error:
        return error_response(400, "WeightsError", str(error))
    except OutdatedUpdateError as error:
        return error_response(409, OUTDATED_UPDATE, str(error))
    except UnpublishedError as error:
        return error_response(503, STALE_WEIGHTS, str(error), retry_after_s=RETRY_STALE_S)
    except QueueFullError as error:
        return error_response(503, QUEUE_FULL, str(error), retry_after_s=error.retry_after_s)
    except GenerationError as error:
        return error_response(500, GENERATION_FAILED, str(error))
    except TransientError as error:
        return error_response(503, "unavailable", str(error), retry_after_s=error.retry_after_s or RETRY_STALE_S)
    except web.HTTPException as error:
        return error_response(error.status, type(error).__name__, error.text or error.reason)
