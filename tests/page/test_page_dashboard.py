"""The dashboard in a real browser, on a run with hostile messages."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from benchmarks.dashboard.index import PER_STEP as LARGE_STEP
from benchmarks.dashboard.index import RUN as LARGE_RUN
from benchmarks.dashboard.index import write_ledger
from rollbook.contracts.trajectory import RolloutSample
from rollbook.run.config.run import RunConfig, dump_toml
from rollbook.run.directory import RunDirectory
from tests.page.conftest import Watched, run_elsewhere, running_server, serious_findings
from tests.parts.dashboard.recorded_run import PER_STEP, STEPS, record_run

MEGABYTES = 10
MANY_GROUPS = 1_000_000
MESSAGES: tuple[dict[str, Any], ...] = (
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I think <img src=x onerror=alert(3)>",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "<b>bash</b>", "arguments": '{"line": "rm -rf ~"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '<a href="https://elsewhere.example">a link</a> caf\ufffd\ufffd'},
    {"role": "user", "content": "x" * (MEGABYTES * 1_000_000)},
)
SIZE = {"width": 1280, "height": 760}
PICTURES = {
    "overview": ("/", "light"),
    "rollouts": ("/rollouts?solved=some", "light"),
    "rollout": ("/rollout/{group}/0?view=tokens&colour=logprob", "dark"),
    "step": ("/steps/{step}", "light"),
    "timeline": ("/timeline", "dark"),
}
"""The pictures of docs/dashboard.md, and their colour schemes."""


def pages_of(group: str, step: int) -> dict[str, str]:
    """Every page, and a text on it."""
    return {
        "/": "Is it learning?",
        "/metrics": "rollout/reward",
        "/steps": "Grad norm",
        f"/steps/{step}": "Batch anatomy",
        "/timeline": "Timeline",
        "/freshness": "Trained groups by step and lag",
        "/law": "Flow of groups",
        "/rollouts": "Mean reward of the group",
        f"/rollout/{quote(group, safe='')}/1": "What became of this group",
        f"/rollout/{quote(group, safe='')}/1?view=tokens&colour=version": "version",
        f"/group/{quote(group, safe='')}": "Sample 1",
        "/tasks": "Never solved",
        "/fleet": "Processes",
        "/health": "Restarts",
        "/actions": "Who did what",
        "/config": "Different from the defaults",
        "/compare": "Up to eight runs",
    }


PAGES = pages_of("task0@0", STEPS - 1)


def judged(sample: RolloutSample) -> RolloutSample:
    """Two judges of one function, one of which did not answer; and a teacher that finds each sampled token impossible."""
    notes = [
        {"model": "grader-<i>large</i>", "score": 0.75, "text": "The answer is <script>alert(4)</script> short."},
        {"model": "grader-small", "score": None, "text": "HTTP 500: overloaded"},
    ]
    taught = [
        row.with_columns(teacher_logprobs=np.where(row.loss_mask, row.logprobs - 4, np.nan)) for row in sample.sequences
    ]
    return replace(
        sample, sequences=tuple(taught), facts={"judges": {"helpful": notes}}, metrics={"reward/helpful": 0.75}
    )


SCORED: list[dict[str, Any]] = [
    {"reward/helpful": 0.5, "reward/helpful_unscored": 0.0, "judge/requests": 6, "judge/failed": 2, "judge/cost": 0.25},
    {"reward/helpful": 0.75, "reward/helpful_unscored": 0.5, "judge/requests": 3, "judge/failed": 1, "judge/cost": 0.5},
]
"""What the dispatcher reports between two steps."""


@dataclass(frozen=True)
class Shown:
    """A dashboard of a folder with three runs, one of them with a damaged ledger."""

    url: str
    run: RunDirectory

    def api(self, path: str) -> Any:
        with urlopen(f"{self.url}/api/{path}") as response:
            return json.load(response)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("runs")
    run = run_elsewhere(record_run(folder / "first", ends=False, more_messages=MESSAGES))
    second = run_elsewhere(record_run(folder / "second", change=judged))
    with second.metrics_file.open("a", encoding="utf-8") as metrics:
        for step, row in enumerate(SCORED, start=1):
            metrics.write(json.dumps({"time": 1000.0 + step, "process": "rollout", "step": step, **row}) + "\n")
            trained = {"time": 1000.5 + step, "process": "trainer", "step": step, "train/teacher_kl": 0.5 / step}
            metrics.write(json.dumps(trained) + "\n")
    damaged = run_elsewhere(record_run(folder / "damaged"))
    for file in damaged.ledger.glob("ledger.sqlite*"):
        file.write_bytes(b"not a database" * 100)
    with running_server(tmp_path_factory.mktemp("dashboard"), "dashboard", str(folder)) as (url, _):
        yield Shown(url, run)


def opened(page: Page, shown: Shown, path: str, run: str = "first") -> None:
    page.goto(f"{shown.url}{path}{'&' if '?' in path else '?'}run={run}")
    expect(page.locator("main h1, main [role=alert], main .notice").first).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_page_opens_without_an_error_is_accessible_and_fits_the_screen(
    page: Page, shown: Shown, scheme: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    findings = []
    for path, text in PAGES.items():
        opened(page, shown, path)
        expect(page.get_by_role("main")).to_contain_text(text)
        findings += [f"{path}: {finding}" for finding in serious_findings(page)]
        if page.evaluate("document.documentElement.scrollWidth") > width:
            findings.append(f"{path}: wider than the screen")
    assert findings == []


def test_messages_with_scripts_links_escape_sequences_and_direction_marks_stay_text(page: Page, shown: Shown) -> None:
    opened(page, shown, "/rollout/task0%400/0")
    main = page.get_by_role("main")
    for text in (
        "<script>alert(1)</script>",
        "⟨ESC⟩[31mred⟨ESC⟩[0m",
        "⟨U+202E⟩right-to-left",
        "[link](javascript:alert(2))",
        "I think <img src=x onerror=alert(3)>",
        "<b>bash</b>",
        '"line": "rm -rf ~"',
        '<a href="https://elsewhere.example">a link</a>',
        "characters are hidden",
    ):
        expect(main).to_contain_text(text)
    assert page.locator("main script, main img, main a[href^='javascript:'], main a[href^='https:']").count() == 0
    assert len(page.locator("main").inner_text()) < 1_000_000


def test_a_rollout_shows_what_the_judges_wrote_and_the_reward_of_each_turn(page: Page, shown: Shown) -> None:
    opened(page, shown, "/rollout/task0%400/1", run="second")
    judges = page.get_by_role("region", name="Judges")
    expect(judges.locator("article")).to_have_count(2)
    expect(judges.locator("article").first).to_contain_text("helpful: 0.75 grader-<i>large</i>")
    expect(judges.locator("article").first).to_contain_text("The answer is <script>alert(4)</script> short.")
    expect(judges.locator("article").last).to_contain_text("HTTP 500: overloaded")
    main = page.get_by_role("main")
    expect(main.locator("article.message.assistant header")).to_contain_text("reward 1,")
    expect(main).to_contain_text("reward: helpful")
    assert serious_findings(page) == []
    opened(page, shown, "/rollout/task0%400/0", run="second")
    expect(main.locator("article.message.assistant header")).to_contain_text("reward 0,")


def test_the_teacher_is_shown_with_the_tokens_and_the_scores_of_the_run_on_the_overview(
    page: Page, shown: Shown
) -> None:
    opened(page, shown, "/rollout/task0%400/1?view=tokens&colour=teacher", run="second")
    main = page.get_by_role("main")
    expect(main).to_contain_text("-4 nats a token")
    expect(main).to_contain_text("the teacher would rarely say it")
    expect(main.locator(".tokens span.n8[data-at]").first).to_be_visible()
    page.locator(".tokens span.n8[data-at]").first.dispatch_event("pointerover")
    expect(main.locator(".token-fact")).to_contain_text("teacher's logprob")
    opened(page, shown, "/overview", run="second")
    expect(main).to_contain_text("Reward functions")
    expect(main).to_contain_text("helpful 0.75")
    scores = page.get_by_role("region", name="Judges and teacher")
    for text in ("requests9", "failed3", "cost0.75", "distance to the teacher0.5 → 0.25"):
        expect(scores).to_contain_text(text)
    assert serious_findings(page) == []
    opened(page, shown, "/rollout/task0%400/1?view=tokens")
    expect(main.get_by_role("group", name="Colour tokens by")).not_to_contain_text("teacher")
    opened(page, shown, "/overview")
    expect(main).to_contain_text("Is it learning?")
    expect(main).not_to_contain_text("Reward functions")


@pytest.mark.parametrize(
    "case",
    [
        # An answer of the prompt comes first; the turns belong to the last two.
        ([0, 0], None, ["", "reward 0.5", "reward -2"]),
        # The turns of a sub-agent are not those of the conversation.
        ([0, 1, 1, 0], [("main", None), ("subagent", 0)], ["", "reward 0.5", "reward 7"]),
        # Each turn in a sequence of its own; the first answer is no longer in the history.
        ([0, 1, 1, 1], [("main", None), ("turn", 0)], ["reward -2", "reward 3", "reward 7"]),
        # Which answers the further turns belong to is not known.
        ([0, 0, 0, 0], None, ["", "", ""]),
    ],
)
def test_the_rewards_of_turns_are_at_the_answers_of_these_turns(
    page: Page, shown: Shown, case: tuple[list[int], list[tuple[str, int | None]] | None, list[str]]
) -> None:
    sequences, lineage, expected = case

    def with_turns(route: Route) -> None:
        response = route.fetch()
        answer = response.json()
        (one, *_) = answer["samples"][0]["turns"]
        roles = ("user", "assistant", "user", "assistant", "tool", "assistant")
        found = answer["samples"][0]
        found |= {
            "messages": [{**found["messages"][0], "role": role, "content": role} for role in roles],
            "sequences": 2,
            "turns": [
                {**one, "sequence": sequence, "reward": reward}
                for sequence, reward in zip(sequences, (0.5, -2, 3, 7), strict=False)
            ],
        }
        if lineage is not None:
            told = [{"sequence": at, "role": role, "parent": parent} for at, (role, parent) in enumerate(lineage)]
            found["facts"] = {"lineage": told}
        route.fulfill(response=response, json=answer)

    page.route(re.compile(r"/api/groups/task1%400\?"), with_turns)
    opened(page, shown, "/rollout/task1%400/0")
    headers = page.locator("main article.message.assistant header")
    expect(headers).to_have_count(len(expected))
    for at, text in enumerate(expected):
        if text:
            expect(headers.nth(at)).to_contain_text(f", {text},")
        else:
            expect(headers.nth(at)).not_to_contain_text("reward")
    expect(page.get_by_role("main")).to_contain_text("; ".join(["0.5", "-2", "3", "7"][: len(sequences)]))


def test_the_conversations_of_an_episode_are_a_tree_with_links_to_their_tokens(page: Page, shown: Shown) -> None:
    lineage = [
        {"sequence": 0, "role": "side", "parent": 1, "agent": None, "left_out": 'side with train_only = "agents"'},
        {"sequence": 1, "role": "main", "parent": None, "agent": "thread-1"},
        {"sequence": 2, "role": "subagent<b>", "parent": 1, "agent": "thread-2"},
        {"sequence": 3, "role": "rewrite", "parent": 2, "agent": "thread-2"},
        {"sequence": 99, "role": "nowhere", "parent": None},
    ]

    def with_lineage(route: Route) -> None:
        response = route.fetch()
        answer = response.json()
        answer["samples"][0] |= {"sequences": 4, "facts": {"lineage": lineage}}
        route.fulfill(response=response, json=answer)

    page.route(re.compile(r"/api/groups/task1%400\?"), with_lineage)
    opened(page, shown, "/rollout/task1%400/0")
    tree = page.locator("main .lineage").first
    expect(tree.locator("> li > a")).to_have_text(["main"])
    expect(tree.locator("> li > .lineage > li > a")).to_have_text(["side", "subagent<b>"])
    expect(tree.locator("> li > .lineage > li > .lineage > li > a")).to_have_text(["rewrite"])
    expect(tree).to_contain_text('Not trained: side with train_only = "agents"')
    expect(page.get_by_role("main")).not_to_contain_text("nowhere,")
    expect(tree.get_by_role("link", name="rewrite")).to_have_attribute("href", re.compile("view=tokens.*sequence=3"))
    assert serious_findings(page) == []


def test_filters_are_in_the_address_and_a_copied_link_shows_the_same_groups(
    browser: Browser, page: Page, shown: Shown
) -> None:
    opened(page, shown, "/rollouts")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(shown.api("groups?run=first")["total"])
    named = rows.filter(has_text="task1@0").locator("td").first
    expect(named).to_contain_text("<script>alert(1)</script> ⟨ESC⟩[31mred")
    assert "link" in str(named.get_by_role("link").get_attribute("title"))
    page.get_by_role("group", name="State").get_by_role("button", name="dropped").click()
    expect(page).to_have_url(re.compile("state=dropped"))
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("filtered")
    page.get_by_role("button", name="Remove the filter state").click()
    page.get_by_label("Task id").fill("task1")
    page.get_by_label("Task id").press("Enter")
    expect(rows).to_have_count(1)
    copied = browser.new_page()
    copied.goto(page.url)
    expect(copied.locator("tbody tr")).to_contain_text(["task1@0"])
    copied.close()
    page.go_back()
    expect(rows).to_have_count(shown.api("groups?run=first")["total"])


def test_dragging_over_the_histogram_selects_rewards(page: Page, shown: Shown) -> None:
    opened(page, shown, "/rollouts")
    box = page.get_by_role("img", name="Groups by mean reward").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 20, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile("reward="))
    expect(page.get_by_role("group", name="Active filters")).to_contain_text("reward")


def test_j_and_k_move_within_the_filter(page: Page, shown: Shown) -> None:
    listed = [row["group_id"] for row in shown.api("groups?run=first&state=durable")["groups"]]
    assert len(listed) >= 3
    opened(page, shown, "/rollouts?state=durable")
    expect(page.locator("tbody tr")).to_have_count(len(listed))
    for key, expected in (("j", listed[0]), ("j", listed[1]), ("k", listed[0])):
        page.keyboard.press(key)
        expect(page.locator("tr[aria-selected=true]")).to_contain_text(expected)
    page.keyboard.press("Enter")
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text(listed[0])
    for key, expected in (("j", listed[1]), ("j", listed[2]), ("k", listed[1])):
        page.keyboard.press(key)
        expect(heading).to_have_text(expected)
    expect(page.get_by_role("main")).to_contain_text(f"2 of {len(listed)}")
    page.keyboard.press("l")
    expect(page).to_have_url(re.compile(r"/rollout/[^/]+/1\?.*state=durable"))
    page.keyboard.press("g")
    expect(page).to_have_url(re.compile(r"/group/.*state=durable"))
    expect(heading).to_have_text(listed[1])


def test_the_samples_of_a_group_are_side_by_side_with_shared_messages_shown_once(page: Page, shown: Shown) -> None:
    opened(page, shown, "/group/task0%400")
    expect(page.get_by_role("main")).to_contain_text("All samples are identical.")
    expect(page.locator("article")).to_have_count(2 + len(MESSAGES))
    page.get_by_role("link", name="Sample 1").click()
    expect(page).to_have_url(re.compile("/rollout/task0%400/1"))


def test_tokens_show_their_values_and_the_chosen_colour_is_in_the_address(page: Page, shown: Shown) -> None:
    opened(page, shown, "/rollout/task0%400/0?view=tokens")
    trained = page.locator(".tokens span[data-at]:not(.masked)")
    expect(trained).to_have_count(1)
    trained.hover()
    expect(page.locator(".token-fact")).to_contain_text("logprob -0.5")
    page.get_by_role("button", name="author").click()
    expect(page).to_have_url(re.compile("colour=author"))


def test_values_move_when_the_run_goes_on(page: Page, shown: Shown) -> None:
    opened(page, shown, "/")
    reward = page.locator(".stat", has_text="Reward")
    expect(reward).to_contain_text("0.3")
    row = {"time": 1004.0, "process": "trainer", "step": STEPS + 1, "rollout/reward": 0.75, "train/tokens": 4.0}
    with shown.run.metrics_file.open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")
    expect(reward).to_contain_text("0.75")


def test_a_task_opens_its_groups_and_a_step_its_samples(page: Page, shown: Shown) -> None:
    opened(page, shown, "/tasks")
    page.locator("tbody tr", has_text="task2").get_by_role("link").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("task2@0")
    opened(page, shown, "/steps")
    page.get_by_role("link", name="2", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 2")
    page.get_by_role("link", name="Rollouts of this step").click()
    expect(page.locator("tbody tr")).to_have_count(PER_STEP)


def test_the_audit_runs_on_a_button(page: Page, shown: Shown) -> None:
    opened(page, shown, "/law", run="second")
    page.get_by_role("button", name="Audit now").click()
    expect(page.get_by_role("region", name="Audit")).to_contain_text("passed")
    page.get_by_role("link", name="dropped: filtered").click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_an_unknown_page_an_unknown_run_and_an_unknown_group_are_reported(unwatched_page: Page, shown: Shown) -> None:
    page = unwatched_page
    opened(page, shown, "/nothing")
    expect(page.get_by_role("main")).to_contain_text("There is no such page.")
    opened(page, shown, "/rollout/absent%400/0")
    expect(page.get_by_role("alert")).to_contain_text("absent@0")
    opened(page, shown, "/", run="third")
    expect(page.get_by_role("alert")).to_contain_text("third")


def test_a_run_whose_ledger_is_damaged_is_reported_on_every_page(
    followed: tuple[Page, Watched], unwatched_page: Page, shown: Shown
) -> None:
    _, found = followed
    found.problems.clear()
    for path in PAGES:
        opened(unwatched_page, shown, path, run="damaged")
        expect(unwatched_page.get_by_role("alert").first).to_contain_text("cannot be read")
    assert [problem for problem in found.problems if problem.startswith("exception")] == []


def test_a_killed_dashboard_is_reported_and_the_last_values_stay(browser: Browser, tmp_path: Path) -> None:
    run_elsewhere(record_run(tmp_path / "run"))
    with running_server(tmp_path, "dashboard", str(tmp_path / "run")) as (url, server):
        page = browser.new_page()
        page.goto(url)
        expect(page.get_by_role("main")).to_contain_text("Is it learning?")
        server.kill()
        server.wait()
        expect(page.get_by_role("status").first).to_contain_text("does not answer")
        expect(page.get_by_role("main")).to_contain_text("Is it learning?")
        page.close()


def test_with_a_token_the_page_opens_after_the_right_one_was_entered(browser: Browser, tmp_path: Path) -> None:
    run_elsewhere(record_run(tmp_path / "run"))
    token = tmp_path / "token"
    with running_server(tmp_path, "dashboard", str(tmp_path / "run"), "--token-file", str(token)) as (url, _):
        page = browser.new_page()
        page.goto(f"{url}/rollouts?state=dropped")
        page.get_by_label("needs a token").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_contain_text("token")
        page.get_by_label("needs a token").fill(token.read_text().strip())
        page.get_by_role("button", name="Open").click()
        expect(page.locator("tbody tr").first).to_contain_text("dropped")
        page.close()


def test_an_operator_acts_on_the_page_and_everyone_sees_who_did_what(
    browser: Browser, watched: Watched, tmp_path: Path
) -> None:
    run_elsewhere(record_run(tmp_path / "run", ends=False))
    token = tmp_path / "operator"
    flags = ("--allow-actions", "--operator-token-file", str(token))
    with running_server(tmp_path, "dashboard", str(tmp_path / "run"), *flags) as (url, _):
        page = watched.follow(browser.new_page())
        page.goto(f"{url}/actions")
        page.get_by_label("enter the operator token").fill(token.read_text().strip())
        page.get_by_role("button", name="Unlock").click()
        page.get_by_label("Your name").fill("Ada")
        page.get_by_role("button", name="Pause admission").click()
        assert page.locator("tbody tr").count() == 0, "an action needs a confirmation"
        page.get_by_label("Why (optional)").fill("<b>the reward is wrong</b>")
        page.locator("form.confirm").get_by_role("button", name="Pause admission").click()
        expect(page.locator("tbody tr").first).to_contain_text("<b>the reward is wrong</b>")
        expect(page.locator(".bar")).to_contain_text("admission paused")
        assert serious_findings(page) == []
        page.goto(f"{url}/rollout/task0%400/1")
        page.get_by_label("Note about sample 1").fill("it guesses")
        page.get_by_role("button", name="Add the note").click()
        expect(page.get_by_role("region", name="Notes")).to_contain_text("Ada")
        page.get_by_role("link", name="quarantine").click()
        page.locator("form.confirm").get_by_role("button", name="Quarantine task0").click()
        expect(page.locator("tbody tr").first).to_contain_text("quarantine")
        page.close()


def test_a_killed_ledger_is_reported_and_the_last_values_stay(browser: Browser, tmp_path: Path) -> None:
    run = run_elsewhere(record_run(tmp_path / "run"))
    (tmp_path / "ledger").mkdir()
    with (
        running_server(tmp_path / "ledger", "ledger", "serve", "--store", f"sqlite:///{run.ledger}") as (
            ledger,
            server,
        ),
        running_server(tmp_path, "dashboard", ledger) as (url, _),
    ):
        page = browser.new_page()
        page.goto(f"{url}/law")
        expect(page.get_by_role("main")).to_contain_text("Flow of groups")
        server.kill()
        alert = page.get_by_role("alert").first
        expect(alert).to_contain_text("cannot be read", timeout=90_000)
        expect(alert).to_contain_text("no response")
        expect(page.get_by_role("main")).to_contain_text("Flow of groups")
        page.close()


def open_every_page(page: Page, url: str, pages: Mapping[str, str]) -> None:
    for path, text in pages.items():
        page.goto(url + path)
        expect(page.get_by_role("main")).to_contain_text(text)
        expect(page.locator(".loading")).to_have_count(0)
        assert page.locator("main [role=alert]").count() == 0, path


def large_run(path: Path, num_groups: int) -> RunDirectory:
    run = RunDirectory(path)
    run.prepare()
    sections = {"run": {"name": LARGE_RUN}, "model": {"path": "model"}, "tasks": {"source": "tasks.jsonl"}}
    run.config_file.write_text(dump_toml(RunConfig.model_validate(sections)), encoding="utf-8")
    run.write_manifest(name=LARGE_RUN, source_dir=run.path)
    run.ledger.mkdir(exist_ok=True)
    write_ledger(run.ledger, num_groups)
    add_steps(run, range(1, num_groups // LARGE_STEP + 1))
    return run


def add_steps(run: RunDirectory, steps: range) -> None:
    with run.metrics_file.open("a", encoding="utf-8") as metrics:
        for step in steps:
            row = {
                "time": 1.7e9 + step,
                "process": "trainer",
                "step": step,
                "rollout/reward": step / steps.stop,
                "train/grad_norm": 1.0,
            }
            metrics.write(json.dumps(row) + "\n")


def test_lists_have_no_gap_and_no_foreign_rows_while_the_run_goes_on(
    browser: Browser, watched: Watched, tmp_path: Path
) -> None:
    run = large_run(tmp_path / "run", 150 * LARGE_STEP)
    with running_server(tmp_path, "dashboard", str(run.path)) as (url, _):
        page = watched.follow(browser.new_page())
        page.goto(f"{url}/steps")
        page.get_by_role("button", name="Load older steps").click()
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(150)
        add_steps(run, range(151, 211))
        expect(page.locator(".bar-progress b")).to_have_text("210")
        page.wait_for_timeout(4000)  # the time between two updates of the list, and more
        shown = [int(text) for text in page.locator("tbody tr td:first-child").all_inner_texts()]
        assert shown == list(range(shown[0], 0, -1))

        page.goto(f"{url}/rollouts")
        expect(rows).to_have_count(50)
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route(lambda address: "cursor=" in address, hold)
        page.get_by_role("button", name="Load more").click()
        page.get_by_label("Order").select_option("oldest")
        first = json.loads(urlopen(f"{url}/api/groups?order=oldest&limit=1").read())["groups"][0]["group_id"]
        expect(rows.first).to_contain_text(first)
        (late,) = held
        with page.expect_response(lambda response: "cursor=" in response.url):
            late.continue_()
        page.wait_for_timeout(500)
        expect(rows).to_have_count(50)
        page.close()


def test_a_page_of_a_list_that_could_not_be_loaded_says_why_and_can_be_tried_again(
    browser: Browser, tmp_path: Path
) -> None:
    run = large_run(tmp_path / "run", 150 * LARGE_STEP)
    with running_server(tmp_path, "dashboard", str(run.path)) as (url, _):
        page = browser.new_page()
        for path, label, first, both in (("steps", "Load older steps", 100, 150), ("rollouts", "Load more", 50, 100)):
            page.goto(f"{url}/{path}")
            rows = page.locator("tbody tr")
            expect(rows).to_have_count(first)
            page.route(re.compile("before=|cursor="), lambda route: route.abort())
            page.get_by_role("button", name=label).click()
            expect(page.get_by_role("alert")).to_contain_text("does not answer")
            page.unroute_all()
            page.get_by_role("button", name="Try again").click()
            expect(rows).to_have_count(both)
            expect(page.get_by_role("alert")).to_have_count(0)
        page.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_page_works_on_a_run_with_a_million_groups(browser: Browser, watched: Watched, tmp_path: Path) -> None:
    run = large_run(tmp_path / "run", MANY_GROUPS)
    with running_server(tmp_path, "dashboard", str(run.path)) as (url, _):
        page = watched.follow(browser.new_page())
        page.goto(f"{url}/rollouts?state=durable&reward=0.7:")
        main, heading = page.get_by_role("main"), page.get_by_role("heading", level=1)
        while json.loads(urlopen(f"{url}/api/groups?limit=1").read())["index"]["indexed"] < MANY_GROUPS:
            page.wait_for_timeout(1000)
        page.reload()
        expect(main).to_contain_text(f"of {MANY_GROUPS:,}")
        expect(page.locator("tbody tr").first).to_contain_text("durable")
        listed = json.loads(urlopen(f"{url}/api/groups?state=durable&reward=0.7:&limit=3").read())["groups"]
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        for key, at in (("", 0), ("j", 1), ("j", 2), ("k", 1)):
            if key:
                page.keyboard.press(key)
            expect(heading).to_have_text(listed[at]["group_id"])
        expect(main).to_contain_text("What became of this group")
        copied = watched.follow(browser.new_page())
        copied.goto(page.url)
        expect(copied.get_by_role("heading", level=1)).to_have_text(listed[1]["group_id"])
        copied.close()
        pages = pages_of(listed[0]["group_id"], listed[0]["step"])
        # The run has no payloads and no decided batches.
        without = re.compile("steps/|view=tokens|^/group")
        open_every_page(page, url, {path: text for path, text in pages.items() if not without.search(path)})
        page.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_page_works_while_a_real_run_trains_and_when_it_has_finished(
    browser: Browser, watched: Watched, tmp_path: Path
) -> None:
    """With `ROLLBOOK_PICTURES=FOLDER` it draws the pictures of docs/dashboard.md: `make pictures`."""
    run = tmp_path / "demo"
    # The pictures show a whole demo, and the test needs only some steps.
    pictures = os.environ.get("ROLLBOOK_PICTURES")
    steps = [] if pictures else ["--set", "trainer.max_steps=60"]
    command = ["-m", "rollbook", "demo", "--run-dir", str(run), *steps]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
        page = watched.follow(browser.new_page(viewport=SIZE))  # type: ignore[arg-type]
        while not (run / "metrics.jsonl").exists():
            assert training.poll() is None
            time.sleep(0.1)
        with running_server(tmp_path, "dashboard", str(run)) as (url, _):
            page.goto(url)
            step = page.locator(".bar-progress b")
            for _ in range(3):
                expect(step).not_to_have_text(step.inner_text(), timeout=200_000)
            query = f"{url}/api/groups?state=durable,trained&solved=some&order=-tokens&limit=1"
            group = json.loads(urlopen(query).read())["groups"][0]["group_id"]
            open_every_page(page, url, pages_of(group, 2))
            assert training.wait() == 0
            expect(page.locator(".bar")).to_contain_text("finished")
            open_every_page(page, url, pages_of(group, 20))
            if pictures is not None:
                draw_pictures(browser, url, run, group, Path(pictures))
            page.close()


def draw_pictures(browser: Browser, url: str, run: Path, group: str, folder: Path) -> None:
    def with_another_path(route: Route) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, body=reply.text().replace(str(run), "/srv/runs/demo"))

    for name, (path, scheme) in PICTURES.items():
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if scheme == "dark" else "light")  # type: ignore[arg-type]
        page.route(re.compile(r"/api/run\b"), with_another_path)
        page.goto(url + path.format(group=quote(group, safe=""), step=40))
        expect(page.locator("main h1").first).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        page.wait_for_timeout(1500)  # the charts are drawn after their data arrived
        page.screenshot(path=folder / f"{name}.png")
        page.unroute_all(behavior="ignoreErrors")  # a reply may be on its way
        page.close()
