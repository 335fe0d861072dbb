"""The Atropos API as a table, from which its routes, its OpenAPI document and its documentation pages are derived.

The pages `/docs` (Swagger UI) and `/redoc` (ReDoc) are where users of the original look for its API. Scripts and styles come from
the package `fastapi-offline` (the extra `api-docs`), so the pages need no network. Only its files are read; it is not imported.
Without it, both pages are a plain table.
"""

import html
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollbook.ledger.atropos.bodies import bytes_response
from rollbook.ledger.atropos.models import EnvIdentifier, RegisterEnv, Registration, ScoredData

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class AtroposRoute:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    is_list: bool = False

    @property
    def name(self) -> str:
        """The operation id, and the name of the handler."""
        return self.path.strip("/").replace("-", "_") or "root"


VERBS = (
    AtroposRoute("GET", "/", "The name of the API"),
    AtroposRoute("POST", "/register", "Register a trainer and its starting step", Registration),
    AtroposRoute("POST", "/register-env", "Register an environment; it may have to wait for a trainer", RegisterEnv),
    AtroposRoute("POST", "/disconnect-env", "Disconnect an environment", EnvIdentifier),
    AtroposRoute("GET", "/wandb_info", "Group and project of the metrics"),
    AtroposRoute("GET", "/info", "Sequences in a batch and tokens in a sequence"),
    AtroposRoute("GET", "/batch", "The next batch, or null"),
    AtroposRoute("GET", "/latest_example", "The last group that was queued"),
    AtroposRoute("POST", "/scored_data", "Post a group", ScoredData),
    AtroposRoute("POST", "/scored_data_list", "Post several groups, all or none", ScoredData, is_list=True),
    AtroposRoute("GET", "/status", "Step and queue size"),
    AtroposRoute("GET", "/status-env", "Step and queue size for one environment", EnvIdentifier),
    AtroposRoute("GET", "/reset_data", "Drop all data"),
)


def _operation(verb: AtroposRoute) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": verb.summary,
        "operationId": verb.name,
        "responses": {"200": {"description": "Success"}},
    }
    if verb.body is not None:
        schema: dict[str, Any] = {"$ref": REFERENCE.format(model=verb.body.__name__)}
        if verb.is_list:
            schema = {"type": "array", "items": schema}
        if verb.method == "GET":  # browsers and Swagger UI send no body with a GET
            operation["parameters"] = [
                {"name": name, "in": "query", "required": True, "schema": field}
                for name, field in verb.body.model_json_schema()["properties"].items()
            ]
        else:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        operation["responses"]["422"] = {"description": "The body is invalid; `detail` says where and why"}
    return operation


def openapi_document(prefix: str) -> bytes:
    """`prefix`: where the API is served. "Try it out" sends its requests there."""
    return json.dumps({**_DOCUMENT, "servers": [{"url": prefix or "/"}]}).encode()


def _document() -> dict[str, Any]:
    models: tuple[type[BaseModel], ...] = (Registration, RegisterEnv, EnvIdentifier, ScoredData)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AtroposLib API", "version": "0.4.0", "description": "The Atropos API of the ledger."},
        "paths": {verb.path: {verb.method.lower(): _operation(verb)} for verb in VERBS},
        "components": {"schemas": schemas["$defs"]},
    }


_DOCUMENT = _document()

SWAGGER_SCRIPT, SWAGGER_STYLE, REDOC_SCRIPT = "swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js"
START_SCRIPT = "start.js"
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; worker-src 'self' blob:; "
    "object-src 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from other hosts, and no other site can embed the pages."""


def _installed_files() -> Path | None:
    spec = find_spec("fastapi_offline")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "static"


def _table() -> str:
    rows = "".join(
        f"<tr><td>{verb.method}</td><td><code>{html.escape(verb.path)}</code></td><td>{html.escape(verb.summary)}</td></tr>"
        for verb in VERBS
    )
    return f"<h1>AtroposLib API</h1><table>{rows}</table><p>Schemas: <a href=openapi.json>openapi.json</a></p>"


def _page(body: str, *, style: str = "") -> bytes:
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>AtroposLib API</title><link rel=icon href=data:,>"
    return f"{head}{style}<body>{body}</body></html>".encode()


_FILES = _installed_files()
# Paths are relative, so that they are also right under `/atropos/RUN`.
_PLAIN = _page(f"{_table()}<p>Install the extra <code>api-docs</code> of rollbook for an interactive page.</p>")
SWAGGER_PAGE = (
    _PLAIN
    if _FILES is None
    else _page(
        f"<div id=swagger-ui></div><noscript>{_table()}</noscript>"
        f"<script src=docs/static/{SWAGGER_SCRIPT}></script><script src=docs/static/{START_SCRIPT}></script>",
        style=f"<link rel=stylesheet href=docs/static/{SWAGGER_STYLE}>",
    )
)
REDOC_PAGE = (
    _PLAIN
    if _FILES is None
    else _page(
        "<redoc spec-url=openapi.json disable-search=true></redoc>"
        f"<noscript>{_table()}</noscript><script src=docs/static/{REDOC_SCRIPT}></script>",
        style="<style>body{margin:0}</style>",
    )
)
# A separate file: inline scripts are forbidden by the policy.
_START = b"SwaggerUIBundle({url: 'openapi.json', dom_id: '#swagger-ui', deepLinking: true});"


def page_response(request: web.Request, page: bytes) -> web.Response:
    response = bytes_response(request, page, content_type="text/html")
    response.headers["Content-Security-Policy"] = POLICY
    return response


def read_docs_file(name: str) -> tuple[str, bytes]:
    """The content type and content of a script or style of the pages."""
    if name == START_SCRIPT:
        return CONTENT_TYPES[".js"], _START
    if _FILES is None or name not in (SWAGGER_SCRIPT, SWAGGER_STYLE, REDOC_SCRIPT):
        raise web.HTTPNotFound
    path = _FILES / name
    return CONTENT_TYPES[path.suffix], path.read_bytes()
