"""The OpenAPI document of the native API, generated from the verbs and the message types."""

from typing import Any

import msgspec

from rollbook import __version__
from rollbook.ledger.http import wire
from rollbook.ledger.http.verb import Declaration, Form
from rollbook.ledger.http.verbs import VERBS

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "the body does not match its content type",
    "401": "no token, or an unknown one",
    "403": "the token has another role, or a web page sent the request",
    "404": "no such run, group or batch",
    "408": "the body did not arrive in time",
    "409": "a newer trainer or dispatcher has this role: stop",
    "413": "the decompressed body is too large",
    "415": "the content type or encoding is not supported",
    "422": "a field is invalid, or the state of the run does not allow the request",
    "429": "the queue is full: try again after `Retry-After` seconds",
    "503": "the ledger cannot respond now: try again",
    "507": "the store cannot be written: an operator must act",
}


def openapi_document() -> dict[str, Any]:
    """The same for every ledger of this release."""
    types = [
        *(verb.request for verb in VERBS if verb.has_body),
        *(verb.response for verb in VERBS if verb.form in (Form.MESSAGE, Form.FRAMES, Form.EVENTS)),
        wire.ErrorReply,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = {str(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for verb in VERBS:
        paths.setdefault(verb.path, {})[verb.method.lower()] = _operation(verb, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollbook ledger, native API", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def query_parameters(verb: Declaration) -> dict[str, dict[str, Any]]:
    """The schemas of the query parameters by name."""
    if verb.has_body:
        return {}
    (_,), components = msgspec.json.schema_components([verb.request], ref_template=REF)
    properties: dict[str, dict[str, Any]] = components[verb.request.__name__]["properties"]
    return {name: schema for name, schema in properties.items() if name not in verb.path_fields}


def _operation(verb: Declaration, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": verb.name,
        "summary": verb.summary,
        "parameters": _parameters(verb),
        "responses": {"200": _response(verb, schemas), **_errors(verb, schemas)},
    }
    if verb.roles is not None:
        operation["security"] = [{"token": sorted(verb.roles)}]
    if verb.has_body:
        operation["requestBody"] = {"required": True, "content": _message(schemas[str(verb.request)])}
    return operation


def _parameters(verb: Declaration) -> list[dict[str, Any]]:
    kinds = {"step": {"type": "integer", "minimum": 1}}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": kinds.get(name, {"type": "string"})}
        for name in verb.path_fields
    ]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in query_parameters(verb).items()]
    return in_path + in_query


def _message(schema: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind in (wire.CONTENT_TYPE, wire.JSON_CONTENT_TYPE)}


def _response(verb: Declaration, schemas: dict[str, Any]) -> dict[str, Any]:
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    content: dict[str, Any]
    match verb.form:
        case Form.MESSAGE:
            content = _message(schemas[str(verb.response)])
        case Form.FRAMES | Form.FRAME:
            content = binary
        case Form.EVENTS:
            content = {"text/event-stream": {"schema": schemas[str(verb.response)]}}
        case Form.TEXT:
            content = {"text/plain": {"schema": {"type": "string"}}}
        case Form.JSON:
            content = {wire.JSON_CONTENT_TYPE: {"schema": {"type": "object"}}}
    return {"description": "success", "content": content}


def _errors(verb: Declaration, schemas: dict[str, Any]) -> dict[str, Any]:
    statuses = set(ERRORS)
    if not verb.has_body:
        statuses -= {"408", "413", "415", "409"}
    if verb.name != "submit":
        statuses -= {"429"}
    if verb.roles is None:
        statuses -= {"401", "403", "404", "400", "422"}
    content = {wire.JSON_CONTENT_TYPE: {"schema": schemas[str(wire.ErrorReply)]}}
    return {status: {"description": ERRORS[status], "content": content} for status in sorted(statuses)}
