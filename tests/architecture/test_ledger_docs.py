"""docs/http-api.md and the OpenAPI document are generated; docs/ledger-rules.md has every rule that is cited."""

import re
from pathlib import Path

from rollbook.ledger.http.handlers import METHODS
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.verbs import VERBS
from scripts.docs.http_api import http_api_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "http-api.md"
RULES = ROOT / "docs" / "ledger-rules.md"


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


def test_every_cited_rule_is_on_the_page_of_rules() -> None:
    known = {int(number) for number in re.findall(r"^### (\d+)\. ", RULES.read_text(encoding="utf-8"), re.MULTILINE)}
    cited: dict[int, str] = {}
    for file in [*ROOT.glob("rollbook/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = file.read_text(encoding="utf-8")
        for words in re.findall(r"ledger-rules\.md,\s+rules? (\d+(?:(?:, | and | to )\d+)*)", text):
            cited |= {int(number): file.name for number in re.findall(r"\d+", words)}
        if file.name != Path(__file__).name:
            assert not re.search(r"(?<!ledger-rules\.md, )\b(?:PROTOCOL )?[Rr]ules? \d+", text), (
                f"{file}: cite docs/ledger-rules.md"
            )
    assert cited
    assert {number: file for number, file in cited.items() if number not in known} == {}


def test_every_rule_names_tests_that_exist() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", tests))
    for rule in re.split(r"^### ", RULES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        named = set(re.findall(r"`(test_\w+)`", rule))
        assert named, f"rule {rule.splitlines()[0]}: no test is named"
        assert named <= defined, f"rule {rule.splitlines()[0]}: {named - defined}"
