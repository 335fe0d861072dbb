"""The application: its routes, its errors and its security headers.

Every response forbids the browser to load anything from other hosts. Everything that models and environments wrote is sent as JSON,
never as HTML.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollbook.access.guard import REFUSE, Problem
from rollbook.access.server import for_any_name
from rollbook.contracts.errors import NotFoundError, RollbookError, RunError, UsageError
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server import actions, charts, fleet, groups, overview, steps, tasks
from rollbook.dashboard.server.access import DashboardAccess, PageRole
from rollbook.dashboard.server.events import Events
from rollbook.dashboard.server.request import (
    BadPageRequestError,
    BusyError,
    ForbiddenError,
    SharedReplies,
    error_reply,
    read_body,
    reply,
)
from rollbook.dashboard.server.runs import OpenRuns

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STATIC = Path(str(files("rollbook.dashboard") / "static"))
MAX_BODY_BYTES = 1 << 16
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MISSING_PAGE = (
    "The page of the dashboard is not installed: static/index.html is missing. Install the wheel, or run `make page`."
)
OPEN_PATHS = frozenset({"/api/login", "/api/session"})
"""Usable without a token, apart from the page itself."""

SHARED_ROUTES: dict[str, Callable[[RunView, web.Request], Awaitable[Any]]] = {
    "/api/run": overview.overview,
    "/api/law": overview.law,
    "/api/series": charts.series,
    "/api/freshness": charts.freshness,
    "/api/timeline": charts.timeline,
    "/api/steps": steps.list_steps,
    "/api/groups": groups.list_groups,
    "/api/tasks": tasks.list_tasks,
    "/api/fleet": fleet.fleet,
    "/api/health": fleet.health,
    "/api/config": fleet.config,
}
"""What pages request again and again while a run goes on. One reply serves all of them."""


class Login(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: str


def build_app(runs: OpenRuns, access: DashboardAccess, *, static: Path = STATIC) -> web.Application:
    shared = SharedReplies()
    checks = [_headers, _errors, _require_role(access), shared.clear_after_post]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=checks)
    app[REFUSE] = _refuse
    events = Events(runs, on_change=shared.clear)
    app.cleanup_ctx.append(events.running)

    async def login(request: web.Request) -> web.StreamResponse:
        role = access.role_of_token((await read_body(request, Login)).token)
        if role is None:
            return error_reply(401, "token_required", "the access token is unknown to this dashboard")
        response = web.Response(status=204)
        access.start_session(response, role, is_https=request.secure)
        return response

    async def session(request: web.Request) -> web.StreamResponse:
        role = access.role_of(request)
        return reply({"authenticated": role is not None, "role": role, "needs_token": access.needs_token})

    async def page(request: web.Request) -> web.StreamResponse:
        index = static / "index.html"
        if not index.is_file():
            return web.Response(status=503, text=MISSING_PAGE)
        return web.FileResponse(index)

    def on_run(view: Callable[[Any, web.Request], Awaitable[Any]], *, is_shared: bool = False) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            async def compute() -> Any:
                return await view(await runs.find(request.query.get("run")), request)

            return await shared.reply(request.path_qs, compute) if is_shared else reply(await compute())

        return handle

    async def act(request: web.Request) -> web.StreamResponse:
        if not runs.allows_actions:
            raise ForbiddenError("this dashboard only shows runs; start it with --allow-actions to act on them")
        if access.role_of(request) is not PageRole.OPERATOR:
            raise ForbiddenError("this needs the access token of an operator")
        return reply(await actions.act(await runs.find(request.query.get("run")), request))

    def on_all(view: Callable[[OpenRuns, web.Request], Awaitable[Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await shared.reply(request.path_qs, lambda: view(runs, request))

        return handle

    app.router.add_post("/api/login", login)
    app.router.add_get("/api/session", session)
    app.router.add_get("/api/runs", on_all(overview.list_runs))
    for path, view in SHARED_ROUTES.items():
        app.router.add_get(path, on_run(view, is_shared=True))
    app.router.add_post("/api/audit", on_run(overview.audit))
    app.router.add_get("/api/actions", on_run(actions.list_actions))
    app.router.add_post("/api/actions", act)
    app.router.add_get("/api/compare", on_all(charts.compare))
    app.router.add_get("/api/steps/{step}", on_run(steps.anatomy))
    app.router.add_get(for_any_name("/api/groups/{group}/tokens"), on_run(groups.tokens))
    app.router.add_get(for_any_name("/api/groups/{group}"), on_run(groups.show_group))
    app.router.add_get("/api/events", events.stream)
    app.router.add_route("*", "/api/{rest:.*}", _unknown)
    if static.is_dir():
        app.router.add_static("/static/", static)
    app.router.add_get("/{rest:.*}", page)
    return app


async def _unknown(request: web.Request) -> web.StreamResponse:
    return error_reply(404, "not_found", f"there is no {request.method} {request.path[:200]}")


def _refuse(_: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    response = error_reply(problem.status, "forbidden", message)
    response.headers.update(HEADERS)
    return response


@web.middleware
async def _headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Security headers for every response, errors included. Server-sent events set them before they begin."""
    response = await handler(request)
    if not response.prepared:
        response.headers.update(HEADERS)
        if request.path.startswith("/static/") and "v" in request.query and response.status < 400:
            # The address contains the digest of the file.
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Expected errors as JSON with a message in words."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        # aiohttp refuses to list a folder of static files with 403.
        is_absent = error.status in (403, 404)
        return error_reply(
            404 if is_absent else error.status, "not_found" if is_absent else "bad_request", error.reason
        )
    except NotFoundError as error:
        return error_reply(404, "not_found", str(error))
    except (BadPageRequestError, UsageError) as error:
        return error_reply(400, "bad_request", str(error))
    except ForbiddenError as error:
        return error_reply(403, "forbidden", str(error))
    except BusyError as error:
        return error_reply(409, "busy", str(error))
    except RunError as error:
        # The ledger refuses it; another attempt would be refused too. Reading fails with other errors.
        is_refused = request.method == "POST" and request.path == "/api/actions"
        kind = "refused" if is_refused else "ledger_unavailable"
        return error_reply(409 if is_refused else 503, kind, str(error))
    except (RollbookError, OSError) as error:
        return error_reply(503, "ledger_unavailable", str(error))


def _require_role(access: DashboardAccess) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_checked = request.path.startswith("/api/") and request.path not in OPEN_PATHS
        if is_checked and access.role_of(request) is None:
            return error_reply(401, "token_required", "this dashboard needs an access token")
        return await handler(request)

    return check
