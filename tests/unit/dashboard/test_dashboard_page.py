"""The committed pages are built from the committed sources, and contain nothing that their content security policy blocks."""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "dashboard_page"
PAGES = [
    ROOT / "rollbook/dashboard/static/index.html",
    ROOT / "rollbook/envs/server/static/playground.html",
]


def source_digest() -> str:
    """The digest of `dashboard_page/build.mjs`."""
    files = [path for path in (SOURCES / "src").rglob("*") if path.is_file()]
    files += [
        SOURCES / name for name in ("build.mjs", "index.html", "playground.html", "package-lock.json", "tsconfig.json")
    ]
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.relative_to(SOURCES).as_posix()):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_committed_page_is_built_from_the_committed_sources(page: Path) -> None:
    (script,) = page.parent.glob("*.js")
    found = re.search(r"sha256:([0-9a-f]{64})", script.read_text()[:300])
    assert found is not None
    assert found[1] == source_digest(), "dashboard_page changed: run `make page` and commit the result"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_inline_script_no_inline_style_and_no_foreign_address(page: Path) -> None:
    html = page.read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []
    assert re.findall(r"(?:src|href)=\"(?!/)", html) == []
    for name in re.findall(r"(?:src|href)=\"[^\"]*/([\w.]+)(?:\?[^\"]*)?\"", html):
        assert (page.parent / name).is_file(), name


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (SOURCES / "package-lock.json").read_text()
