"""`/docs` and `/redoc` of `run-api` in a real browser: they describe the Atropos API, and "Try it out" sends its requests."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import Watched


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("atropos")
    options = ["--port", "0", "--store", f"sqlite:///{home / 'data'}", "--token-file", str(home / "token")]
    command = [sys.executable, "-m", "rollbook.commands.servers.run_api", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield server.stderr.readline().split()[1]
        server.terminate()
        server.stderr.read()


def _try_out(page: Page, operation: str) -> str:
    """The status and body of the response that Swagger UI shows."""
    block = page.locator(f"#operations-default-{operation}")
    block.locator(".opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    live = block.locator(".live-responses-table .response").first
    expect(live).to_be_visible()
    return live.inner_text()


@pytest.mark.parametrize("prefix", ["", "/atropos/second"])
def test_requests_of_the_documentation_page_reach_the_api_it_describes(
    browser: Browser, address: str, watched: Watched, prefix: str
) -> None:
    page = watched.follow(browser.new_page())
    page.goto(f"{address}{prefix}/docs")
    expect(page.get_by_role("heading", name="AtroposLib API")).to_be_visible()
    assert '"uuid"' in _try_out(page, "register")
    assert '"batch": null' in _try_out(page, "batch")
    assert "Reset successful" in _try_out(page, "reset_data")
    page.close()


def test_redoc_shows_the_atropos_api(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/redoc")
    expect(page.get_by_text("Register a trainer and its starting step").first).to_be_visible()
    page.close()
