"""Prints docs/http-api.md from the verbs and the message types: `python -m scripts.docs.http_api`."""

import inspect
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.group_codec import LARGEST
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Role
from rollbook.ledger.http.openapi import ERRORS, openapi_document, query_parameters
from rollbook.ledger.http.verb import Declaration, Form
from rollbook.ledger.http.verbs import VERBS

INTRODUCTION = f"""# HTTP API of the ledger (native)

This page is generated: `make docs`. A running ledger serves the same as OpenAPI 3.1
under `/v1/openapi.json`.

**Bodies** are MessagePack (`Content-Type: {wire.CONTENT_TYPE}`; byte strings as they are) or JSON
(`{wire.JSON_CONTENT_TYPE}`; byte strings in base64). Responses to POST and PUT are MessagePack unless `Accept` requests JSON;
responses to GET are JSON unless `Accept` requests MessagePack. Unknown fields are rejected. A body may be compressed
(`Content-Encoding: zstd`, `gzip` or `deflate`); responses are compressed with zstd if `Accept-Encoding` contains it.

**Retries** are safe for every request: groups have ids, requests carry a nonce or an epoch, and the second response equals
the first.

**Long polls** (`open`, `batch`) take `wait_s`. The response is sent as soon as there is a result, and after
{wire.MAX_WAIT_S:g} seconds at the latest.

**Tokens**: `Authorization: Bearer …`. On loopback only requests of the role `trainer` require one, the token of the run, unless
tokens by role are configured; elsewhere every request does. Requests of web pages are refused. See [security](security.md).

**Integers** have at most 53 bits, so that every store and every JSON parser keeps them exactly.
"""


def http_api_page() -> str:
    parts = [INTRODUCTION, _roles(), _errors(), _session(), "## Routes\n"]
    parts += [_verb(verb) for verb in VERBS]
    parts += ["## Messages\n", *_messages()]
    return "\n".join(parts).rstrip() + "\n"


def _roles() -> str:
    rows = {
        Role.PRODUCER: "opens and submits groups",
        Role.TRAINER: "creates runs, takes batches and acknowledges them",
        Role.VIEWER: "reads only",
    }
    lines = [f"| `{role}` | {description} |" for role, description in rows.items()]
    return "\n".join(["## Roles\n", "| role | what its token allows |", "|---|---|", *lines, ""])


def _errors() -> str:
    lines = [f"| {status} {HTTPStatus(int(status)).phrase} | {cause} |" for status, cause in ERRORS.items()]
    form = 'An error is JSON: `{"kind": …, "message": …}`. The message says what is wrong and what to do.\n'
    return "\n".join(["## Errors\n", form, "| status | meaning |", "|---|---|", *lines, ""])


def _session() -> str:
    script = Path(__file__).with_name("session.sh").read_text(encoding="utf-8")
    return f"## A run with curl\n\nEvery route once, in the order of a run. A test executes it.\n\n```sh\n{script}```\n"


def _verb(verb: Declaration) -> str:
    roles = (
        "any client, without a token" if verb.roles is None else ", ".join(f"`{role}`" for role in sorted(verb.roles))
    )
    if verb.is_steering:
        roles += "; it needs a token even on loopback"
    lines = [f"### {verb.method} {verb.path}\n", f"{verb.summary}\n", f"- role: {roles}"]
    for name, schema in query_parameters(verb).items():
        default = msgspec.json.encode(schema["default"]).decode()
        lines.append(f"- query `{name}`: {schema['description']} (default `{default}`)")
    if verb.has_body:
        lines.append(f"- body: {_link(verb.request)}")
    lines.append(f"- response: {_response(verb)}")
    return "\n".join([*lines, ""])


def _response(verb: Declaration) -> str:
    if verb.form is Form.MESSAGE:
        return _link(verb.response)
    if verb.form is Form.EVENTS:
        return f"server-sent events: `status` with {_link(verb.response)} as JSON, and `end` when the ledger stops"
    if verb.form is Form.FRAMES:
        head = f"{_link(verb.response)} as MessagePack"
        return f"frames, each preceded by its length (8 bytes, big-endian): {head}, then the payloads"
    return {
        Form.FRAME: "one payload, as it is stored (MessagePack, see `rollbook/contracts/group_codec.py`)",
        Form.TEXT: "text",
        Form.JSON: "JSON",
    }[verb.form]


def _link(kind: Any) -> str:
    items = getattr(kind, "__args__", None)
    if items:
        return f"list of {_link(items[0])}"
    if kind is str:
        return "string"
    if kind is None or kind is type(None):
        return "null"
    return f"[`{kind.__name__}`](#{kind.__name__.lower()})"


def _messages() -> list[str]:
    schemas = openapi_document()["components"]["schemas"]
    known = {
        name: kind for name, kind in vars(wire).items() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)
    }
    return [_message(name, schema, known.get(name)) for name, schema in sorted(schemas.items())]


def _message(name: str, message: dict[str, Any], kind: type | None) -> str:
    lines = [f"### {name}\n"]
    if kind is not None and kind.__doc__ and kind.__doc__ != wire.Message.__doc__:
        lines.append(f"{inspect.cleandoc(kind.__doc__)}\n")
    if "enum" in message:
        return "\n".join([*lines, "one of " + ", ".join(f"`{value}`" for value in message["enum"]), ""])
    if "prefixItems" in message:
        items = ", ".join(_type(item) for item in message["prefixItems"])
        return "\n".join([*lines, f"{message['description']} An array of {items}.", ""])
    fields = message.get("properties", {})
    if not fields:
        return "\n".join([*lines, "no fields", ""])
    lines += ["| field | type | |", "|---|---|---|"]
    required = set(message.get("required", ()))
    for field, schema in fields.items():
        default = (
            "required" if field in required else f"default `{msgspec.json.encode(schema.get('default')).decode()}`"
        )
        lines.append(f"| `{field}` | {_type(schema)} | {default} |")
    return "\n".join([*lines, ""])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    if kind == "object":
        return f"map to {_type(schema['additionalProperties'])}" if "additionalProperties" in schema else "map"
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}
    found = [f"{sign} {schema[name]:g}" for name, sign in limits.items() if name in schema and schema[name] != LARGEST]
    return f"{kind} ({', '.join(found)})" if found else kind


if __name__ == "__main__":
    sys.stdout.write(http_api_page())
