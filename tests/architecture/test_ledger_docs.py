"""The page about HTTP is made from the code, and says what the code does."""

from pathlib import Path

from rollbook.ledger.http.handlers import NativeRoutes
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.reference import http_api_page
from rollbook.ledger.http.routes import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


def test_the_page_about_http_is_up_to_date() -> None:
    wanted = http_api_page()
    assert PAGE.read_text(encoding="utf-8") == wanted, "run `make docs`"


def test_every_route_is_answered_and_documented() -> None:
    paths = openapi_document()["paths"]
    for route in ROUTES:
        assert callable(getattr(NativeRoutes, route.name))
        assert route.method.lower() in paths[route.path]


def test_every_reference_of_the_openapi_document_leads_somewhere() -> None:
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
