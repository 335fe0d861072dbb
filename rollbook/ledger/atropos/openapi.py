"""The Atropos API as a table, from which its routes, its OpenAPI document and its documentation pages are derived."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollbook.ledger.atropos.models import EnvIdentifier, RegisterEnv, Registration, ScoredData

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Verb:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    is_list: bool = False

    @property
    def name(self) -> str:
        """Also the name of the handler."""
        return self.path.strip("/").replace("-", "_") or "root"


VERBS = (
    Verb("GET", "/", "The name of the API"),
    Verb("POST", "/register", "Register a trainer and its starting step", Registration),
    Verb("POST", "/register-env", "Register an environment; it may have to wait for a trainer", RegisterEnv),
    Verb("POST", "/disconnect-env", "Disconnect an environment", EnvIdentifier),
    Verb("GET", "/wandb_info", "Group and project of the metrics"),
    Verb("GET", "/info", "Sequences in a batch and tokens in a sequence"),
    Verb("GET", "/batch", "The next batch, or null"),
    Verb("GET", "/latest_example", "The last group that was queued"),
    Verb("POST", "/scored_data", "Post a group", ScoredData),
    Verb("POST", "/scored_data_list", "Post several groups, all or none", ScoredData, is_list=True),
    Verb("GET", "/status", "Step and queue size"),
    Verb("GET", "/status-env", "Step and queue size for one environment", EnvIdentifier),
    Verb("GET", "/reset_data", "Drop all data"),
)


def _operation(verb: Verb) -> dict[str, Any]:
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


def _document() -> dict[str, Any]:
    models: tuple[type[BaseModel], ...] = (Registration, RegisterEnv, EnvIdentifier, ScoredData)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AtroposLib API", "version": "0.4.0", "description": "The Atropos API of the ledger."},
        "paths": {verb.path: {verb.method.lower(): _operation(verb)} for verb in VERBS},
        "components": {"schemas": schemas["$defs"]},
    }


OPENAPI = json.dumps(_document()).encode()
