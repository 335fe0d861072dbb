"""`rollbook env play` in a real browser."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import Watched

START_S = 60.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A playground of the terminal environment."""
    ready = tmp_path_factory.mktemp("playground") / "ready.json"
    command = [sys.executable, "-m", "rollbook", "env", "play", "--env", "terminal", "--port", "0"]
    with subprocess.Popen([*command, "--ready-file", str(ready)], stderr=subprocess.DEVNULL) as server:
        try:
            yield _address(ready, server)
        finally:
            os.kill(server.pid, signal.SIGTERM)


def _address(ready: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        assert server.poll() is None, "the playground did not start"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def _act(page: Page, text: str) -> None:
    page.get_by_label("Your action").fill(text)
    page.get_by_label("Your action").press("Enter")


def test_a_task_is_chosen_played_and_solved_by_hand(browser: Browser, address: str, watched: Watched) -> None:
    page = browser.new_page()
    watched.follow(page)
    page.goto(address)
    page.get_by_role("button", name="terminal-rename").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("Rename draft.txt to final.txt")
    _act(page, "<b>mv</b> draft.txt")
    expect(log).to_contain_text("<b>mv</b> draft.txt")
    _act(page, "mv draft.txt final.txt")
    expect(page.get_by_text("Solved.")).to_be_visible()
    expect(page.get_by_role("region", name="Score")).to_contain_text("reward1")
    expect(page.get_by_role("region", name="files now")).to_contain_text("/home/final.txt")
    page.close()


def test_a_task_that_is_not_json_is_reported_and_a_wrong_one_too(
    browser: Browser, address: str, watched: Watched
) -> None:
    page = browser.new_page()
    watched.follow(page)
    page.goto(address)
    page.get_by_text("Your own task").click()
    page.get_by_label("Task as a JSON object").fill("{")
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_role("alert")).to_contain_text("This is not JSON")
    page.get_by_label("Task as a JSON object").fill('{"goal": "nothing"}')
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_role("log")).to_contain_text("the task lacks expect")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_is_accessible_and_fits_a_phone(
    browser: Browser, address: str, watched: Watched, scheme: str
) -> None:
    page = browser.new_page(
        viewport={"width": 390, "height": 844}, color_scheme="dark" if scheme == "dark" else "light"
    )
    watched.follow(page)
    page.goto(address)
    page.get_by_role("button", name="terminal-count").click()
    expect(page.get_by_role("log")).to_contain_text("names.txt")
    serious = [
        finding["id"]
        for finding in Axe().run(page).response["violations"]
        if finding["impact"] in {"serious", "critical"}
    ]
    assert serious == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
