"""The dialect described for machines, and a page about it for people."""

import html
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollbook.ledger.atropos.models import EnvIdentifier, RegisterEnv, Registration, ScoredData

REFERENCE = "#/components/schemas/{model}"
VERBS: tuple[tuple[str, str, str, type[BaseModel] | None, bool], ...] = (
    ("get", "/", "The name of the API", None, False),
    ("post", "/register", "A trainer says what it wants and where it stands", Registration, False),
    ("post", "/register-env", "An environment introduces itself, or is told to wait", RegisterEnv, False),
    ("post", "/disconnect-env", "An environment leaves", EnvIdentifier, False),
    ("get", "/wandb_info", "Where metrics go", None, False),
    ("get", "/info", "Sequences in a batch and tokens in a sequence", None, False),
    ("get", "/batch", "The next batch, or null", None, False),
    ("get", "/latest_example", "The group that was queued last", None, False),
    ("post", "/scored_data", "A group", ScoredData, False),
    ("post", "/scored_data_list", "Several groups, all or none", ScoredData, True),
    ("get", "/status", "Step and queue", None, False),
    ("get", "/status-env", "Step and queue as one environment should see them", EnvIdentifier, False),
    ("get", "/reset_data", "Drop everything", None, False),
)


def _operation(path: str, summary: str, model: type[BaseModel] | None, is_list: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": path.strip("/").replace("-", "_") or "root",
        "responses": {"200": {"description": "Done"}},
    }
    if model is not None:
        schema: dict[str, Any] = {"$ref": REFERENCE.format(model=model.__name__)}
        if is_list:
            schema = {"type": "array", "items": schema}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        operation["responses"]["422"] = {"description": "The body cannot be taken; `detail` says where and why"}
    return operation


def _describe() -> dict[str, Any]:
    models: tuple[type[BaseModel], ...] = (Registration, RegisterEnv, EnvIdentifier, ScoredData)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AtroposLib API", "version": "0.4.0", "description": "The Atropos dialect of the ledger."},
        "paths": {path: {verb: _operation(path, summary, model, many)} for verb, path, summary, model, many in VERBS},
        "components": {"schemas": schemas["$defs"]},
    }


def _page() -> str:
    rows = "".join(
        f"<tr><td>{verb.upper()}</td><td><code>{html.escape(path)}</code></td><td>{html.escape(summary)}</td></tr>"
        for verb, path, summary, _, _ in VERBS
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>AtroposLib API</title>"
        "<style>body{font:16px system-ui;margin:2rem}td{padding:.2rem 1rem .2rem 0}</style>"
        f"<h1>AtroposLib API</h1><table>{rows}</table><p>Schemas: <a href=openapi.json>openapi.json</a></p></html>"
    )


OPENAPI = json.dumps(_describe()).encode()
DOCS_PAGE = _page().encode()
