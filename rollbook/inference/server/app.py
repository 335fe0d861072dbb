"""HTTP over one engine: which path leads where. Routes and errors are those of OpenAI and vLLM where they have them."""

import hmac
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine
from rollbook.inference.server.routes.adapters import AdapterRoutes
from rollbook.inference.server.routes.chat import ChatRoutes
from rollbook.inference.server.routes.completions import CompletionRoutes
from rollbook.inference.server.routes.generate import GenerateRoutes
from rollbook.inference.server.routes.pausing import PausingRoutes
from rollbook.inference.server.routes.replies import Handler, error_response, errors
from rollbook.inference.server.routes.status import TellingRoutes
from rollbook.inference.server.routes.weights import WeightRoutes
from rollbook.inference.server.service import MODEL_NAME, PolicyService
from rollbook.inference.server.tokenizer import Texts
from rollbook.inference.server.weight_updates import WeightIntake

MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million tokens fits; an endless body does not."""
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Asked by load balancers that have no key; they tell nothing about the data."""

SERVICE: web.AppKey[PolicyService] = web.AppKey("service", PolicyService)
"""For whoever runs the server: draining it is said here."""


def build_app(
    engine: Engine,
    config: InferenceConfig,
    *,
    texts: Texts | None = None,
    model_names: Sequence[str] = (MODEL_NAME,),
    api_key: str | None = None,
) -> web.Application:
    """The server over an open engine. Run it with `handler_cancellation=True`, as `serve` does: who leaves frees its slot."""
    service = PolicyService(engine, config, texts=texts, model_names=model_names)
    intake = WeightIntake(engine)
    middlewares = [errors] if api_key is None else [errors, _keyed(api_key)]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    _add_answering(app, service)
    _add_steering(app, service, intake)

    app[SERVICE] = service

    async def leave(_app: web.Application) -> None:
        await intake.leave()

    app.on_cleanup.append(leave)
    return app


def _add_answering(app: web.Application, service: PolicyService) -> None:
    telling = TellingRoutes(service)
    app.router.add_post("/v1/completions", CompletionRoutes(service).complete)
    app.router.add_post("/v1/chat/completions", ChatRoutes(service).complete)
    app.router.add_post("/inference/v1/generate", GenerateRoutes(service).generate)
    app.router.add_get("/v1/models", telling.models)
    app.router.add_get("/v1/models/{name:.+}", telling.model)
    app.router.add_get("/health", telling.health)
    app.router.add_get("/ping", telling.health)
    app.router.add_get("/version", telling.version)
    app.router.add_get("/metrics", telling.metrics)
    app.router.add_post("/drain", telling.drain)


def _add_steering(app: web.Application, service: PolicyService, intake: WeightIntake) -> None:
    pausing, weights = PausingRoutes(service), WeightRoutes(service, intake)
    app.router.add_post("/pause", pausing.pause)
    app.router.add_post("/resume", pausing.resume)
    app.router.add_get("/is_paused", pausing.is_paused)
    app.router.add_post("/abort_requests", pausing.abort)
    app.router.add_get("/get_world_size", weights.world_size)
    app.router.add_post("/init_weight_transfer_engine", weights.init)
    app.router.add_post("/shutdown_weight_transfer_engine", weights.leave)
    app.router.add_post("/start_weight_update", weights.start)
    app.router.add_post("/update_weights", weights.update)
    app.router.add_post("/finish_weight_update", weights.finish)
    app.router.add_post("/update_weight_version", weights.rename)
    app.router.add_get("/weight_info", weights.info)
    app.router.add_post("/weight_checker", weights.check)
    app.router.add_post("/collective_rpc", weights.collective_rpc)
    adapters = AdapterRoutes(service)
    app.router.add_post("/v1/load_lora_adapter", adapters.load)
    app.router.add_post("/v1/unload_lora_adapter", adapters.unload)


def _keyed(api_key: str) -> web.middleware:  # type: ignore[valid-type]  # aiohttp's decorator is no type
    @web.middleware
    async def demand(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whoever may steer the weights may also ask: one key for everything."""
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path in OPEN_PATHS or hmac.compare_digest(shown.encode(), api_key.encode()):
            return await handler(request)
        return error_response(401, "AuthenticationError", "a bearer token is needed that this server knows")

    return demand


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
