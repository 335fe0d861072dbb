"""The HTTP application of the policy server. Routes and errors follow OpenAI and vLLM where those define them."""

import hmac
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine
from rollbook.inference.server.routes.chat import ChatRoutes
from rollbook.inference.server.routes.completions import CompletionRoutes
from rollbook.inference.server.routes.engine import EngineRoutes
from rollbook.inference.server.routes.responses import Handler, error_middleware, error_response
from rollbook.inference.server.routes.tokens import TokenRoutes
from rollbook.inference.server.routes.weights import AdapterRoutes, WeightRoutes
from rollbook.inference.server.service import MODEL_NAME, PolicyService
from rollbook.inference.server.text import Tokenizer
from rollbook.inference.server.weight_updates import WeightUpdates

MAX_BODY_BYTES = 64 * 2**20
"""Enough for a prompt of a million tokens."""
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Load balancers call them without a key. They contain no data."""

SERVICE: web.AppKey[PolicyService] = web.AppKey("service", PolicyService)
"""Gives the process that runs the server access to the service, to drain it."""


def build_app(
    engine: Engine,
    config: InferenceConfig,
    *,
    tokenizer: Tokenizer | None = None,
    model_names: Sequence[str] = (MODEL_NAME,),
    api_key: str | None = None,
) -> web.Application:
    """The application for an open engine. Run it with `handler_cancellation=True`, so that a disconnected client frees its slot."""
    service = PolicyService(engine, config, tokenizer=tokenizer, model_names=model_names)
    updates = WeightUpdates(engine)
    middlewares = [error_middleware] if api_key is None else [error_middleware, _key_middleware(api_key)]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    app[SERVICE] = service
    completions, control, tokens = CompletionRoutes(service), EngineRoutes(service), TokenRoutes(service)
    weights, adapters = WeightRoutes(service, updates), AdapterRoutes(service)
    app.add_routes(
        [
            web.post("/v1/completions", completions.complete),
            web.post("/v1/chat/completions", ChatRoutes(service).complete),
            web.post("/inference/v1/generate", completions.generate),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/tokenizer_info", tokens.info),
            web.get("/v1/models", control.models),
            web.get("/v1/models/{name:.+}", control.model),
            web.get("/health", control.health),
            web.get("/ping", control.health),
            web.get("/version", control.version),
            web.get("/metrics", control.metrics),
            web.post("/pause", control.pause),
            web.post("/resume", control.resume),
            web.get("/is_paused", control.is_paused),
            web.post("/abort_requests", control.abort),
            web.post("/drain", control.drain),
            web.get("/get_world_size", weights.world_size),
            web.post("/init_weight_transfer_engine", weights.init),
            web.post("/shutdown_weight_transfer_engine", weights.leave),
            web.post("/start_weight_update", weights.start),
            web.post("/update_weights", weights.update),
            web.post("/finish_weight_update", weights.finish),
            web.post("/update_weight_version", weights.rename),
            web.get("/weight_info", weights.info),
            web.post("/weight_checker", weights.check),
            web.post("/collective_rpc", weights.collective_rpc),
            web.post("/v1/load_lora_adapter", adapters.load),
            web.post("/v1/unload_lora_adapter", adapters.unload),
        ]
    )

    async def leave_weight_group(_app: web.Application) -> None:
        await updates.leave()

    app.on_cleanup.append(leave_weight_group)
    return app


def _key_middleware(api_key: str) -> web.middleware:  # type: ignore[valid-type]  # aiohttp's decorator is not a type
    @web.middleware
    async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path in OPEN_PATHS or hmac.compare_digest(key.encode(), api_key.encode()):
            return await handler(request)
        return error_response(401, "AuthenticationError", "a valid bearer token is required")

    return require_key


@asynccontextmanager
async def serve(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve the application and yield its URL. Pass an open `sock` to keep the address across restarts."""
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
