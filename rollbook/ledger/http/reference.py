"""docs/http-api.md, made from the table of routes and the wire's structs: `python -m rollbook.ledger.http.reference` prints it."""

import inspect
import sys
from http import HTTPStatus
from typing import Any

import msgspec

from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Role
from rollbook.ledger.http.openapi import REFUSALS, openapi_document
from rollbook.ledger.http.routes import ROUTES, Form, Route

INTRODUCTION = f"""# HTTP interface of the ledger (native dialect)

This page is generated: `make docs`. A running ledger serves the same as OpenAPI 3.1
under `/openapi.json`.

**Bodies** are MessagePack (`Content-Type: {wire.CONTENT_TYPE}`; byte strings as they are) or, for people, JSON
(`{wire.JSON_CONTENT_TYPE}`; byte strings in base64). Answers to POST and PUT are MessagePack unless `Accept` asks for JSON;
answers to GET are JSON unless `Accept` asks for MessagePack. Unknown fields are refused. A body may be packed
(`Content-Encoding: zstd`, `gzip` or `deflate`); answers are packed with zstd where `Accept-Encoding` names it.

**Repeating** any call is safe: groups have ids, requests carry a nonce or an epoch, and the second answer equals the first.

**Waiting** calls (`open`, `batch`) take `wait_s` and are answered as soon as there is something to say, after
{wire.MOST_WAIT_S:g} seconds at the latest.

**Tokens**: `Authorization: Bearer …`. On loopback none is needed unless some were set; elsewhere each role has its own.

**Integers** have at most 53 bits, so that every store and every reader of JSON keeps them exactly.
"""


def http_api_page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _roles(), _refusals(), "## Routes\n"]
    parts += [_route(route) for route in ROUTES]
    parts += ["## Messages\n", *_messages()]
    return "\n".join(parts).rstrip() + "\n"


def _roles() -> str:
    rows = {
        Role.PRODUCER: "opens and submits groups",
        Role.TRAINER: "creates runs, takes batches and acknowledges them",
        Role.VIEWER: "looks, and changes nothing",
    }
    lines = [f"| `{role}` | {meaning} |" for role, meaning in rows.items()]
    return "\n".join(["## Roles\n", "| role | what its token allows |", "|---|---|", *lines, ""])


def _refusals() -> str:
    lines = [f"| {status} {HTTPStatus(int(status)).phrase} | {meaning} |" for status, meaning in REFUSALS.items()]
    told = 'A refusal is JSON: `{"kind": …, "message": …}`; the message says what is wrong and what to do.\n'
    return "\n".join(["## Refusals\n", told, "| status | meaning |", "|---|---|", *lines, ""])


def _route(route: Route) -> str:
    who = "everybody" if route.roles is None else ", ".join(f"`{role}`" for role in sorted(route.roles))
    lines = [f"### {route.method} {route.path}\n", f"{route.summary}\n", f"- for: {who}"]
    lines += [f"- query `{query.name}`: {query.meaning}" for query in route.query]
    if route.asked is not None:
        lines.append(f"- body: {_link(route.asked)}")
    lines.append(f"- answer: {_answer(route)}")
    return "\n".join([*lines, ""])


def _answer(route: Route) -> str:
    if route.form is Form.MESSAGE:
        return _link(route.answer)
    if route.form is Form.EVENTS:
        return f"server-sent events: `status` with {_link(route.answer)} as JSON, and `end` when the ledger stops"
    return {
        Form.FRAMES: "payloads one after the other, each behind its length (8 bytes, big-endian)",
        Form.FRAME: "one payload, as it is stored (MessagePack, see `rollbook/contracts/group_codec.py`)",
        Form.TEXT: "text",
        Form.JSON: "JSON",
    }[route.form]


def _link(kind: Any) -> str:
    many = getattr(kind, "__args__", None)
    if many:
        return f"list of {_link(many[0])}"
    if kind is str:
        return "string"
    return f"[`{kind.__name__}`](#{kind.__name__.lower()})"


def _messages() -> list[str]:
    schemas = openapi_document()["components"]["schemas"]
    known = {
        name: kind for name, kind in vars(wire).items() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)
    }
    return [_message(name, schema, known.get(name)) for name, schema in sorted(schemas.items())]


def _message(name: str, schema: dict[str, Any], kind: type | None) -> str:
    lines = [f"### {name}\n"]
    if kind is not None and kind.__doc__ and kind.__doc__ != wire.Message.__doc__:
        lines.append(f"{inspect.cleandoc(kind.__doc__)}\n")
    if "enum" in schema:
        return "\n".join([*lines, "one of " + ", ".join(f"`{value}`" for value in schema["enum"]), ""])
    fields = schema.get("properties", {})
    if not fields:
        return "\n".join([*lines, "no fields", ""])
    lines += ["| field | type | |", "|---|---|---|"]
    required = set(schema.get("required", ()))
    for field, told in fields.items():
        default = "required" if field in required else f"default `{msgspec.json.encode(told.get('default')).decode()}`"
        lines.append(f"| `{field}` | {_type(told)} | {default} |")
    return "\n".join([*lines, ""])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    if kind == "object":
        return f"map to {_type(schema['additionalProperties'])}" if "additionalProperties" in schema else "map"
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}
    told = [
        f"{sign} {schema[name]:g}" for name, sign in limits.items() if name in schema and schema[name] != wire.LARGEST
    ]
    return f"{kind} ({', '.join(told)})" if told else kind


if __name__ == "__main__":
    sys.stdout.write(http_api_page())
