"""The pages `/docs` (Swagger UI) and `/redoc` (ReDoc), where users of the original look for its API.

Scripts and styles come from the package `fastapi-offline` (the extra `api-docs`), so the pages need no network. Only its files are
read; it is not imported. Without it, both pages are a plain table.
"""

import html
from importlib.util import find_spec
from pathlib import Path

from aiohttp import web

from rollbook.ledger.atropos.bodies import bytes_response
from rollbook.ledger.atropos.openapi import VERBS

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
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>AtroposLib API</title>"
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
