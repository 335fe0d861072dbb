"""Generated and linked documentation matches the code."""

import re
from pathlib import Path

from rollbook.run.config.reference import reference

ROOT = Path(__file__).parents[2]


def test_every_test_listed_in_the_invariants_exists() -> None:
    listed = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_[a-z0-9_]+)", path.read_text(encoding="utf-8"))
    }
    assert listed - defined == set()
    assert len(listed) > 15


def test_the_configuration_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_links_in_the_documentation_resolve() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []
