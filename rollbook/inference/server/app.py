"""The HTTP application of the policy server. Routes and errors follow OpenAI and vLLM where those define them."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.access.guard import REFUSE, Problem
from rollbook.access.server import serve_app
from rollbook.access.tokens import Secret, bearer_token
from rollbook.concurrency.sockets import listening_socket
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine
from rollbook.inference.server.routes.chat import ChatRoutes
from rollbook.inference.server.routes.completions import CompletionRoutes
from rollbook.inference.server.routes.engine import EngineRoutes
from rollbook.inference.server.routes.responses import Handler, error_middleware, error_response
from rollbook.inference.server.routes.token_stream import TokenStreamRoutes
from rollbook.inference.server.routes.tokens import TokenRoutes
from rollbook.inference.server.routes.weights import AdapterRoutes, WeightRoutes
from rollbook.inference.server.service import MODEL_NAME, PolicyService
from rollbook.inference.server.text import TextTokenizer
from rollbook.inference.server.weight_updates import WeightUpdates
from rollbook.inference.weights.ranges import DATA_ROUTE, MANIFEST_ROUTE, RangeRoutes
from rollbook.inference.wire.token_stream import STREAM_PATH

BODY_BYTES = 2 * 2**20
BODY_BYTES_PER_TOKEN = 8
"""The body of a request may have `BODY_BYTES`, and this much for each token of the model's length: enough for the longest prompt as
token ids or as text. A larger one could block the event loop while it is decoded."""
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Load balancers call them without a key. They contain no data."""

SERVICE: web.AppKey[PolicyService] = web.AppKey("service", PolicyService)
"""Gives the process that runs the server access to the service, to drain it."""


def build_app(
    engine: Engine,
    config: InferenceConfig,
    *,
    tokenizer: TextTokenizer | None = None,
    model_names: Sequence[str] = (MODEL_NAME,),
    api_key: str | None = None,
    steering_token: str | None = None,
) -> web.Application:
    """The application for an open engine. Run it with `handler_cancellation=True`, so that a disconnected client frees its slot.

    `api_key` is required by all requests but health checks. `steering_token` is required by requests that change the engine or its
    weights, and opens all others; without it, the API key opens them too.
    """
    service = PolicyService(engine, config, tokenizer=tokenizer, model_names=model_names)
    updates = WeightUpdates(engine, token=steering_token or api_key)
    steering = None if steering_token is None else Secret(steering_token)
    middlewares: list[Middleware] = [error_middleware]
    if api_key is not None:
        middlewares.append(_require_key([Secret(api_key), *([] if steering is None else [steering])]))
    max_body = BODY_BYTES + BODY_BYTES_PER_TOKEN * engine.max_model_len
    app = web.Application(client_max_size=max_body, middlewares=middlewares)
    app[SERVICE], app[REFUSE] = service, _refuse
    completions, control, tokens = CompletionRoutes(service), EngineRoutes(service), TokenRoutes(service)
    streams = TokenStreamRoutes(service)
    weights, adapters = WeightRoutes(service, updates), AdapterRoutes(service)
    app.add_routes(
        [
            web.post("/v1/completions", completions.complete),
            web.post("/v1/chat/completions", ChatRoutes(service).complete),
            web.post("/inference/v1/generate", completions.generate),
            web.get(STREAM_PATH, streams.connect),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/tokenizer_info", tokens.info),
            web.get("/v1/models", control.models),
            web.get("/v1/models/{name:.+}", control.model),
            web.get("/health", control.health),
            web.get("/ping", control.health),
            web.get("/version", control.version),
            web.get("/metrics", control.metrics),
            web.get("/is_paused", control.is_paused),
            web.post("/abort_requests", control.abort),
            web.get("/get_world_size", weights.world_size),
            web.get("/weight_info", weights.info),
        ]
    )
    for path, handler in (
        ("/pause", control.pause),
        ("/resume", control.resume),
        ("/drain", control.drain),
        ("/init_weight_transfer_engine", weights.init),
        ("/shutdown_weight_transfer_engine", weights.leave),
        ("/start_weight_update", weights.start),
        ("/update_weights", weights.update),
        ("/finish_weight_update", weights.finish),
        ("/update_weight_version", weights.rename),
        ("/weight_checker", weights.check),
        ("/collective_rpc", weights.collective_rpc),
        ("/v1/load_lora_adapter", adapters.load),
        ("/v1/unload_lora_adapter", adapters.unload),
    ):
        app.router.add_post(path, handler if steering is None else _require_steering(handler, steering))

    copies = RangeRoutes(updates.find_copy)
    for path, send in ((MANIFEST_ROUTE, copies.manifest), (DATA_ROUTE, copies.data)):
        app.router.add_get(path, send if steering is None else _require_steering(send, steering))

    async def close_updates(_app: web.Application) -> None:
        updates.close()
        service.close()

    app.on_shutdown.append(streams.close)
    app.on_cleanup.append(close_updates)
    return app


def _require_key(secrets: Sequence[Secret]) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or _has_token(request, secrets):
            return await handler(request)
        return error_response(401, "AuthenticationError", "a valid bearer token is required")

    return check


def _require_steering(handler: Handler, secret: Secret) -> Handler:
    async def check(request: web.Request) -> web.StreamResponse:
        if _has_token(request, [secret]):
            return await handler(request)
        message = (
            f"{request.path} changes the engine or sends its weights, and requires the access token of the run or server: send "
            "'Authorization: Bearer …'. "
            "It is in the file `token` of the run directory, or in the file that the server printed at its start"
        )
        return error_response(401, "AuthenticationError", message)

    return check


def _has_token(request: web.Request, secrets: Sequence[Secret]) -> bool:
    token = bearer_token(request.headers.get("Authorization"))
    return any(secret.matches(token) for secret in secrets)


@asynccontextmanager
async def serve(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve the application and yield its URL. Pass an open `sock` to keep the address across restarts."""
    async with serve_app(app, listening_socket(host, port) if sock is None else sock, drain_s=1.0) as url:
        yield url


def _refuse(_: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    return error_response(
        problem.status, "BadRequestError" if problem is Problem.CONTENT_TYPE else "Forbidden", message
    )
