"""Routes of the Atropos API: at the root for one run, and under `/atropos/RUN` for every other run."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from isal import isal_zlib
from pydantic import BaseModel, ValidationError

from rollbook.access.guard import REFUSE, Problem, is_browser, is_own_page
from rollbook.access.server import for_any_name
from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import check_body
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.atropos.batches import deliver_batch
from rollbook.ledger.atropos.bodies import (
    KNOWN_ERRORS,
    BrowserRefusedError,
    InvalidRunNameError,
    bytes_response,
    deliver,
    error_response,
    json_response,
    read_body,
)
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import (
    EMPTY_EXAMPLE,
    EnvIdentifier,
    RegisterEnv,
    Registration,
    check_storable,
    invalid_body,
)
from rollbook.ledger.atropos.openapi import (
    REDOC_PAGE,
    SWAGGER_PAGE,
    VERBS,
    openapi_document,
    page_response,
    read_docs_file,
)
from rollbook.ledger.atropos.posts import Incoming, Post
from rollbook.ledger.atropos.rules import NoTrainerError, UnknownEnvError
from rollbook.ledger.atropos.scored_data import PostedGroup, invalid_fields, read_group, read_groups, read_json
from rollbook.ledger.atropos.service import AtroposService, open_atropos_service
from rollbook.ledger.http.app import Dialect, LedgerService, refuse
from rollbook.ledger.rules.run_transaction import UnknownRunError
from rollbook.ledger.rules.runs import RUN_ID

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PREFIX = "/atropos/{run}"
NATIVE_PATHS = ("/v1", "/health", "/metrics")
"""Their errors have the form of the native API."""
CLIENT_DISCONNECTED = 499
NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
LARGE_BODY_BYTES = 1 << 20
"""A larger body is parsed in its own thread, so that other posts do not wait for it."""


def atropos_dialect(config: AtroposConfig, *, trainable: TrainingLimits | None = None) -> Dialect:
    """Adds the Atropos API to a ledger service. `trainable` are the limits of the native trainer that trains the groups."""

    def add(service: LedgerService) -> None:
        aiohttp.set_zlib_backend(isal_zlib)  # decompresses gzip at a third of the cost
        routes = _Routes(config, service, trainable or TrainingLimits())
        service.app.cleanup_ctx.append(routes.opened)
        service.app.middlewares.append(_atropos_errors(service))
        service.app[REFUSE] = _refuse
        for prefix in ("", PREFIX):
            for method, path, handler in routes.table():
                service.app.router.add_route(method, for_any_name(f"{prefix}{path}"), handler)

    return add


class _Routes:
    def __init__(self, config: AtroposConfig, service: LedgerService, trainable: TrainingLimits) -> None:
        self._config = config
        self._trainable = trainable
        self._service = service
        self._open: dict[RunId, AtroposService] = {}
        """One for each run that exists and was requested."""
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()

    def table(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler. A handler has the name of its path."""
        declared = [(verb.method, verb.path, getattr(self, verb.name)) for verb in VERBS]
        return [
            *declared,
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
            ("GET", "/redoc", self.redoc),
            ("GET", "/docs/static/{file}", self.docs_file),
        ]

    async def opened(self, _: web.Application) -> AsyncIterator[None]:
        """Opens the run at the root, and closes all runs at the end."""
        async with self._stack:
            await self._open_run(RunId(self._config.run))
            yield

    async def root(self, request: web.Request) -> web.Response:
        return json_response(request, {"message": "AtroposLib API"})

    async def register(self, request: web.Request) -> web.Response:
        message = await self._message(request, Registration)
        run = await self._open_run(self._run_id(request))
        return json_response(request, await run.register(message))

    async def register_env(self, request: web.Request) -> web.Response:
        message = await self._message(request, RegisterEnv)
        run = await self._run(request)
        registered = await run.register_env(message)
        return json_response(request, registered or {"status": "wait for trainer to start"})

    async def disconnect_env(self, request: web.Request) -> web.Response:
        message = await self._message(request, EnvIdentifier)
        run = await self._run(request)
        try:
            await run.disconnect_env(message.env_id)
        except UnknownEnvError as error:
            return json_response(request, {"status": "failure", "error": str(error)})
        return json_response(request, {"status": "success"})

    async def wandb_info(self, request: web.Request) -> web.Response:
        found = await (await self._run(request)).registration()
        group, project = (None, None) if found is None else (found.wandb_group, found.wandb_project)
        return json_response(request, {"group": group, "project": project})

    async def info(self, request: web.Request) -> web.Response:
        found = await (await self._run(request)).registration()
        size, length = (-1, -1) if found is None else (found.batch_size, found.max_token_len)
        return json_response(request, {"batch_size": size, "max_token_len": length})

    async def batch(self, request: web.Request) -> web.StreamResponse:
        _refuse_browsers(request)
        run = await self._run(request)
        try:
            async with run.batch() as handed:
                if handed is None:
                    return json_response(request, {"batch": None})
                return await deliver_batch(request, run, handed)
        except (UnknownRunError, NoTrainerError):
            return json_response(request, NOT_REGISTERED)

    async def latest_example(self, request: web.Request) -> web.Response:
        found = await (await self._run(request)).latest_example()
        return json_response(request, EMPTY_EXAMPLE) if found is None else bytes_response(request, found)

    async def scored_data(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return await self._post(request, len(body), lambda: _single_post(read_group(body)))

    async def scored_data_list(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return await self._post(request, len(body), lambda: _list_post(read_groups(body)))

    async def _post(self, request: web.Request, size: int, read: Callable[[], Post]) -> web.Response:
        """A post is parsed in the thread that stores it, so that its memory is reused for the next post."""
        incoming = Incoming(read)
        if size > LARGE_BODY_BYTES:
            await asyncio.to_thread(incoming.parse)
        run_id = self._run_id(request)
        if run_id not in self._open and not await self._exists(run_id):
            # Only a valid post creates a run.
            await asyncio.to_thread(incoming.require_groups)
        run = await self._open_run(run_id)
        async with run.posted(incoming) as answer:
            return await deliver(request, json_response(request, answer))

    async def status(self, request: web.Request) -> web.Response:
        return json_response(request, await (await self._run(request)).status())

    async def status_env(self, request: web.Request) -> web.Response:
        if "env_id" in request.query:
            message = self._parse({"env_id": request.query["env_id"]}, EnvIdentifier)
        else:
            message = await self._message(request, EnvIdentifier)
        return json_response(request, await (await self._run(request)).status_env(message.env_id))

    async def reset_data(self, request: web.Request) -> web.Response:
        _refuse_browsers(request)
        await (await self._run(request)).reset()
        return web.Response(text="Reset successful")

    async def openapi(self, request: web.Request) -> web.Response:
        return bytes_response(request, openapi_document(request.path.removesuffix("/openapi.json")))

    async def docs(self, request: web.Request) -> web.Response:
        return page_response(request, SWAGGER_PAGE)

    async def redoc(self, request: web.Request) -> web.Response:
        return page_response(request, REDOC_PAGE)

    async def docs_file(self, request: web.Request) -> web.Response:
        content_type, content = await asyncio.to_thread(read_docs_file, request.match_info["file"])
        return bytes_response(request, content, content_type=content_type)

    def _run_id(self, request: web.Request) -> RunId:
        run_id = RunId(request.match_info.get("run", self._config.run))
        if not RUN_ID.fullmatch(run_id):
            raise InvalidRunNameError("a run is named with letters, digits, '.', '_' and '-', at most 128 characters")
        return run_id

    async def _run(self, request: web.Request) -> AtroposService:
        """The run of a request. One that does not exist answers as before a trainer registers, and is not kept."""
        run_id = self._run_id(request)
        if run_id in self._open or await self._exists(run_id):
            return await self._open_run(run_id)
        return self._new_service(run_id)

    async def _exists(self, run_id: RunId) -> bool:
        return await self._service.store.read(lambda tx: tx.runs.get(run_id)) is not None

    async def _open_run(self, run_id: RunId) -> AtroposService:
        async with self._opening:
            run = self._open.get(run_id)
            if run is None:
                run = await self._stack.enter_async_context(open_atropos_service(self._new_service(run_id)))
                self._open[run_id] = run
            return run

    def _new_service(self, run_id: RunId) -> AtroposService:
        service = self._service
        return AtroposService(
            run_id,
            store=service.store,
            config=self._config,
            limits=service.config,
            trainable=self._trainable,
            clock=service.clock,
            log=service.log,
        )

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._service.bodies, timeout_s=self._config.body_s)

    async def _message(self, request: web.Request, expected: type[M]) -> M:
        body = await self._body(request)
        try:
            check_body(body)
        except msgspec.DecodeError as error:
            raise invalid_body("json_invalid", (), f"JSON decode error: {error}", {}) from None
        return self._parse(read_json(body), expected)

    def _parse(self, found: Any, expected: type[M]) -> M:
        try:
            message = expected.model_validate(found, from_attributes=True)
        except ValidationError as error:
            raise invalid_fields(error) from None
        check_storable(message)
        return message


def _single_post(group: PostedGroup) -> Post:
    return Post(digest=group.digest, groups=(group,), is_list=False)


def _list_post(groups: Sequence[PostedGroup]) -> Post:
    digest = hashlib.blake2b("\n".join(group.digest for group in groups).encode(), digest_size=16).hexdigest()
    return Post(digest=f"list {digest}", groups=tuple(groups), is_list=True)


def _refuse_browsers(request: web.Request) -> None:
    """For a GET that changes something: every page can make a browser send a GET, by an image or a link. `/docs` may."""
    if is_browser(request) and not is_own_page(request):
        raise BrowserRefusedError(
            f"GET {request.path} changes data, so it is refused to browsers; use /docs, curl or a client"
        )


def _refuse(request: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    """The response to a request that the guard refused. As in the original, another content type is an invalid body."""
    if request.path.startswith(NATIVE_PATHS):
        return refuse(request, problem, message)
    if problem is Problem.CONTENT_TYPE:
        return error_response(request, invalid_body("model_attributes_type", (), message))
    return json_response(request, {"detail": message}, status=problem.status)


def _atropos_errors(service: LedgerService) -> Middleware:
    """Errors in the form of the original, its CORS headers, and metrics. Only requests of allowed origins pass the guard."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(NATIVE_PATHS):
            return await handler(request)
        started = service.clock.now()
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            response: web.StreamResponse = web.Response(text="OK", headers=_preflight_headers(request))
        else:
            response = await _handle(request, handler)
        if not response.prepared and "Origin" in request.headers:
            # Browsers refuse "*" for a request with credentials, so the original names the origin. So do we.
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Allow-Credentials"] = "true"
            response.headers.add("Vary", "Origin")
        resource = request.match_info.route.resource
        route = "unknown" if resource is None else resource.canonical.removeprefix(PREFIX)
        service.requests.add(f"atropos:{route}", response.status, service.clock.now() - started)
        return response

    return check


async def _handle(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        return web.Response(status=CLIENT_DISCONNECTED)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        response = json_response(request, {"detail": error.reason}, status=error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except KNOWN_ERRORS as error:
        return error_response(request, error)


def _preflight_headers(request: web.Request) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": "600",
    }
