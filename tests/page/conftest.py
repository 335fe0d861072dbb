"""A browser for the tests of the pages, and the servers it visits. `scripts/chromium.sh` installs the browser.

While a browser is open, its thread cannot run an event loop, and tests of other modules need one. So there is one browser per
module, and coroutines run in another thread.

A new page compiles the scripts again, which takes most of its time. So tests use the page of their module,
unless they need a new one.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 120.0
T = TypeVar("T")


@dataclass
class Watched:
    """What went wrong on a page: console errors, exceptions, violations of the policy, requests to other machines, dialogs."""

    problems: list[str] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)

    def follow(self, page: Page) -> Page:
        self.pages.append(page)
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self._request(request.url))
        return page

    def _console(self, kind: str, text: str) -> None:
        if kind == "error" or "Content Security Policy" in text:
            self.problems.append(f"console: {text}")

    def _request(self, url: str) -> None:
        if urlsplit(url).hostname != "127.0.0.1":
            self.problems.append(f"request to another machine: {url}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is installed; `sh scripts/chromium.sh` installs Debian's Chromium"
        )
    with sync_playwright() as playwright:
        # Containers lack the kernel features of the browser's sandbox, and often have a small /dev/shm.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        # Other tests share the cores: a page that never answers is a failure, a slow one is not.
        expect.set_options(timeout=30_000)
        yield browser
        browser.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Fails the test if a page that it follows had a problem. Closes the pages, even of a test that fails: they hold sessions."""
    found = Watched()
    yield found
    for page in found.pages:
        page.close()
    assert found.problems == []


@pytest.fixture(scope="module")
def followed(browser: Browser) -> tuple[Page, Watched]:
    """The page of the module."""
    found = Watched()
    return found.follow(browser.new_page()), found


@pytest.fixture
def unwatched_page(followed: tuple[Page, Watched]) -> Iterator[Page]:
    """The page of the module, whatever problems it has."""
    page, _ = followed
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light")
    yield page
    page.unroute_all()
    page.goto("about:blank")


@pytest.fixture
def page(followed: tuple[Page, Watched], unwatched_page: Page) -> Iterator[Page]:
    """The page of the module. Fails the test if it had a problem."""
    found = followed[1]
    found.problems.clear()
    yield unwatched_page
    assert found.problems == []


@contextmanager
def running_server(directory: Path, *command: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `rollbook COMMAND` on a free port and yield its address."""
    ready = directory / "ready.json"
    arguments = [sys.executable, "-m", "rollbook", *command, "--port", "0", "--ready-file", str(ready)]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                assert server.poll() is None, f"{command} ended with {server.returncode}"
                assert time.monotonic() < deadline, f"{command} did not start"
                time.sleep(0.05)
            found = ready.read_text().strip()
            yield str(json.loads(found)["url"]) if found.startswith("{") else found, server
        finally:
            server.send_signal(signal.SIGTERM)
            ready.unlink(missing_ok=True)


def run_elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs in another thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def serious_findings(page: Page) -> list[str]:
    """What people with disabilities could not use: axe-core's serious and critical findings."""
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:160]}"
        for one in found
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"][:3]
    ]
