"""`rollbook env play` in a real browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import running_server, serious_findings


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A playground of the terminal environment."""
    with running_server(tmp_path_factory.mktemp("playground"), "env", "play", "--env", "terminal") as (url, _):
        yield url


def _act(page: Page, text: str) -> None:
    page.get_by_label("Your action").fill(text)
    page.get_by_label("Your action").press("Enter")


def test_a_task_is_chosen_played_and_solved_by_hand(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("button", name="terminal-rename").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("Rename draft.txt to final.txt")
    _act(page, "<b>mv</b> draft.txt")
    expect(log).to_contain_text("<b>mv</b> draft.txt")
    expect(log).to_contain_text("syntax error")
    _act(page, "mv draft.txt final.txt")
    expect(page.get_by_text("Solved.")).to_be_visible()
    expect(page.get_by_role("region", name="Score")).to_contain_text("reward1")
    expect(page.get_by_role("region", name="files now")).to_contain_text("/home/final.txt")


def test_a_task_that_is_not_json_is_reported_and_an_incomplete_one_too(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_text("Your own task").click()
    page.get_by_label("Task as a JSON object").fill("{")
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_role("alert")).to_contain_text("This is not JSON")
    page.get_by_label("Task as a JSON object").fill('{"goal": "nothing"}')
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_role("log")).to_contain_text("the task lacks expect")


def test_the_playground_is_accessible_and_fits_a_phone_in_dark_mode(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.goto(address)
    page.get_by_role("button", name="terminal-count").click()
    expect(page.get_by_role("log")).to_contain_text("names.txt")
    assert serious_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
