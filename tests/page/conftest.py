"""A browser for the tests of the pages. `scripts/chromium.sh` installs it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Reported by the browser for every blocked script, style, image or connection.
POLICY_VIOLATION = "Content Security Policy"


@dataclass
class Watched:
    """What went wrong on a page: console errors, exceptions, violations of the policy, requests to other machines."""

    problems: list[str] = field(default_factory=list)

    def follow(self, page: Page) -> None:
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", lambda request: self._request(request.url))

    def _console(self, kind: str, text: str) -> None:
        if kind == "error" or POLICY_VIOLATION in text:
            self.problems.append(f"console: {text}")

    def _request(self, url: str) -> None:
        if urlsplit(url).scheme != "data" and urlsplit(url).hostname != "127.0.0.1":
            self.problems.append(f"request to another machine: {url}")


# One browser per module: while it is open, this thread cannot run an event loop, and tests of other modules need one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is installed; `sh scripts/chromium.sh` installs Debian's Chromium"
        )
    with sync_playwright() as playwright:
        browser = _launch(playwright, path)
        try:
            yield browser
        finally:
            browser.close()


def _launch(playwright: Playwright, path: str) -> Browser:
    # Containers lack the kernel features of the browser's sandbox, and often have a small /dev/shm.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Fails the test if a page it follows had a problem."""
    found = Watched()
    yield found
    assert found.problems == []
