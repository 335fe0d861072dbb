"""The OpenAPI document of the native dialect, made from the table of routes and the wire's structs."""

import re
from typing import Any

import msgspec

from rollbook import __version__
from rollbook.ledger.http import wire
from rollbook.ledger.http.routes import ROUTES, Form, Route

REF = "#/components/schemas/{name}"
REFUSALS = {
    "400": "the body is not what its content type says",
    "401": "no token, or an unknown one",
    "403": "the token is for another role",
    "404": "no such run, group or batch",
    "408": "the body did not arrive in time",
    "409": "a newer trainer or dispatcher holds this role: stop",
    "413": "the body, unpacked, is larger than the ledger takes",
    "415": "a content type or encoding that the ledger does not read",
    "422": "a field, or the state of the run, does not allow it",
    "429": "the queue is full: come back after `Retry-After` seconds",
    "503": "the ledger cannot answer now: try again",
    "507": "the store cannot be written: a person must act",
}


def openapi_document() -> dict[str, Any]:
    """The same for every ledger of this release."""
    types = [
        *(route.asked for route in ROUTES if route.asked),
        *(route.answer for route in ROUTES if route.answer),
        wire.ErrorReply,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = {str(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollbook ledger, native dialect", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {"200": _answer(route, schemas), **_refusals(route, schemas)},
    }
    if route.roles is not None:
        operation["security"] = [{"token": sorted(route.roles)}]
    if route.asked is not None:
        schema = schemas[str(route.asked)]
        content = {kind: {"schema": schema} for kind in (wire.CONTENT_TYPE, wire.JSON_CONTENT_TYPE)}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    kinds = {"step": {"type": "integer", "minimum": 1}}
    return [
        {"name": name, "in": "path", "required": True, "schema": kinds.get(name, {"type": "string"})}
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    kinds = {int: {"type": "integer", "minimum": 0}, str: {"type": "string"}}
    return [
        {"name": query.name, "in": "query", "description": query.meaning, "schema": kinds[query.type]}
        for query in route.query
    ]


def _answer(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {
        Form.FRAMES: {"application/octet-stream": binary},
        Form.FRAME: {"application/octet-stream": binary},
        Form.TEXT: {"text/plain": {"schema": {"type": "string"}}},
        Form.JSON: {wire.JSON_CONTENT_TYPE: {"schema": {"type": "object"}}},
    }.get(route.form, {})
    if route.form is Form.EVENTS:
        content = {"text/event-stream": {"schema": schemas[str(route.answer)]}}
    if route.form is Form.MESSAGE:
        content = {kind: {"schema": schemas[str(route.answer)]} for kind in (wire.CONTENT_TYPE, wire.JSON_CONTENT_TYPE)}
    return {"description": "as asked", "content": content}


def _refusals(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    told = set(REFUSALS)
    if route.asked is None:
        told -= {"408", "413", "415", "409"}
    if route.name != "submit":
        told -= {"429"}
    if route.roles is None:
        told -= {"401", "403", "404", "400", "422"}
    content = {wire.JSON_CONTENT_TYPE: {"schema": schemas[str(wire.ErrorReply)]}}
    return {status: {"description": REFUSALS[status], "content": content} for status in sorted(told)}
