"""docs/http-api.md and the OpenAPI document are generated from the list of verbs."""

from pathlib import Path

from rollbook.ledger.http.handlers import METHODS
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.verbs import VERBS
from scripts.docs.http_api import http_api_page

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


def test_the_http_api_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == http_api_page(), "run `make docs`"


def test_every_verb_has_a_handler_and_is_documented() -> None:
    paths = openapi_document()["paths"]
    for verb in VERBS:
        assert verb.name in METHODS
        assert verb.summary
        assert verb.method.lower() in paths[verb.path]


def test_every_reference_of_the_openapi_document_resolves() -> None:
    document = openapi_document()
    refs: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            refs.extend(value for key, value in node.items() if key == "$ref")
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert refs
    assert {ref.rsplit("/", 1)[1] for ref in refs} <= set(document["components"]["schemas"])
