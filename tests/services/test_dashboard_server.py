"""The dashboard's API on a run directory and on a ledger service: what it shows, whom it refuses, and how it survives bad input."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason
from rollbook.dashboard.index.filters import GroupFilter
from rollbook.dashboard.index.follower import FRESH_S, PATIENCE_S, FollowedIndex, follow
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server import overview, task_texts
from rollbook.dashboard.server.access import COOKIE, DashboardAccess
from rollbook.dashboard.server.request import SHARED_S
from rollbook.dashboard.server.task_texts import KEPT_CHARS
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.run.catalog import open_catalog
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.reader import StoreSource, audit
from rollbook.telemetry.token_records import TokenArrays, TokenRecordWriter
from tests.parts.dashboard.recorded_run import HOSTILE, STEPS, DashboardClient, record_run, serving_dashboard
from tests.parts.ledger.groups import RUN, draws
from tests.parts.ledger.service import serving

VIEWER = "a-token-for-viewers-0123"
PATHS = (
    "/api/runs",
    "/api/run",
    "/api/law",
    "/api/series",
    "/api/freshness",
    "/api/timeline",
    "/api/steps",
    "/api/steps/1",
    "/api/groups",
    "/api/groups/task0@0",
    "/api/groups/task0@0/tokens",
    "/api/tasks",
    "/api/actions",
    "/api/fleet",
    "/api/health",
    "/api/config",
    "/api/compare?runs=run",
    "/api/session",
)


@pytest.fixture
async def directory(tmp_path: Path) -> RunDirectory:
    return await record_run(tmp_path / "run")


@pytest.fixture
async def client(directory: RunDirectory) -> AsyncIterator[DashboardClient]:
    async with serving_dashboard(str(directory.path)) as found:
        yield found


async def get(client: DashboardClient, path: str) -> Any:
    """The reply, repeated until the index is complete: on a busy machine that takes longer than a request waits."""
    while True:
        status, found = await client.get(path)
        assert status == 200, (path, found)
        if not isinstance(found, dict) or found.get("index", {}).get("is_complete", True):
            return found


async def test_the_overview_shows_progress_law_and_state(client: DashboardClient) -> None:
    found = await get(client, "/api/run")
    assert (found["state"], found["progress"]["step"], found["progress"]["total_steps"]) == ("finished", STEPS, STEPS)
    assert found["law"]["holds"]
    assert found["law"]["dropped"] == {"filtered": 1, "end_of_run": 1}
    assert found["learning"]["reward"]["last"] == pytest.approx(0.3)
    assert [problem["kind"] for problem in found["problems"]] == []


async def test_the_small_charts_of_the_overview_show_the_whole_run_up_to_its_last_step(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_dashboard(str(directory.path)) as client:
        every = (await get(client, "/api/run"))["sparklines"]["reward"]
    assert len(every) == STEPS
    monkeypatch.setattr(overview, "SPARKLINE_POINTS", 2)
    async with serving_dashboard(str(directory.path)) as client:
        assert (await get(client, "/api/run"))["sparklines"]["reward"] == [every[0], every[2]]


async def test_every_route_of_the_page_has_an_answer(client: DashboardClient) -> None:
    for path in PATHS:
        await get(client, path)


async def test_a_ledger_service_shows_the_same_groups_as_its_directory(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    async with serving_dashboard(str(directory.path)) as files:
        from_files = await get(files, "/api/groups?order=oldest")
        group_from_files = await get(files, "/api/groups/task1@0?order=oldest")
        step_from_files = await get(files, "/api/steps/2")
    async with serving(directory.ledger) as (url, _), serving_dashboard(f"{url}/v1/runs/{RUN}") as service:
        from_service = await get(service, "/api/groups?order=oldest")
        group_from_service = await get(service, "/api/groups/task1@0?order=oldest")
        step_from_service = await get(service, "/api/steps/2")
    for name in ("groups", "total", "histogram", "facets", "index"):
        assert from_service[name] == from_files[name]
    for found in (group_from_files, group_from_service):
        del found["samples"]  # advantages need the configuration
    assert group_from_service == group_from_files
    assert step_from_service["groups"] == step_from_files["groups"]


async def test_filters_select_groups_and_neighbours_stay_within_them(client: DashboardClient) -> None:
    found = await get(client, "/api/groups?step=1-2&order=oldest&limit=3")
    assert [group["group_id"] for group in found["groups"]] == ["task0@0", "task1@0", "task2@0"]
    assert (found["total"], found["total_all"]) == (4, 8)
    rest = await get(client, f"/api/groups?step=1-2&order=oldest&limit=3&cursor={found['next_cursor']}")
    assert [group["group_id"] for group in rest["groups"]] == ["task3@0"]
    assert rest["next_cursor"] is None
    group = await get(client, "/api/groups/task1@0?step=1-2&order=oldest")
    assert (group["previous"], group["next"], group["position"]) == ("task0@0", "task2@0", 1)
    dropped = await get(client, "/api/groups?state=dropped&drop=filtered")
    assert [group["drop_reason"] for group in dropped["groups"]] == ["filtered: all rewards are equal"]


async def test_a_text_is_searched_in_the_messages_within_the_filter(client: DashboardClient) -> None:
    found = await get(client, "/api/groups?text=ANSWER%20of%20task3&state=durable,trained")
    assert [group["group_id"] for group in found["groups"]] == ["task3@0"]
    assert found["searched"] == {"groups": 6, "is_complete": True}


async def test_a_group_shows_its_samples_their_times_and_its_fate(client: DashboardClient) -> None:
    found = await get(client, "/api/groups/task0@0")
    assert found["payload"] == "stored"
    sample = found["samples"][0]
    assert sample["messages"][0]["content"] == HOSTILE
    assert (sample["turns"][0]["queue_s"], sample["turns"][0]["act_s"]) == (0.1, 0.2)
    assert sample["turns"][0]["generate_s"] == pytest.approx(0.4)
    assert sample["turns"][0]["reward"] == sample["reward"]
    assert found["group"]["samples"][1] == {
        "reward": 1.0,
        "solved": True,
        "tokens": 1,
        "turns": 1,
        "end": "done",
        "started_at": 1001.0,
        "seconds": 2.0,
    }
    assert found["divergence"] == {"turn": None}
    assert any("was trained" in sentence for sentence in found["sentences"])
    tokens = await get(client, "/api/groups/task0@0/tokens?sample=1")
    assert (tokens["mask"], tokens["version"], tokens["logprob"]) == ([0, 0, 1], [-1, -1, 0], [None, None, -0.5])


async def test_the_anatomy_of_a_step_has_the_parts_of_each_sample(client: DashboardClient) -> None:
    found = await get(client, "/api/steps/2")
    assert [group["group_id"] for group in found["groups"]] == ["task2@0", "task3@0"]
    sample = found["groups"][0]["samples"][0]
    assert [name for name, _, _ in sample["parts"]][:4] == ["wait", "generate", "act", "other"]
    assert sample["versions"] == [1]
    assert (found["previous"], found["next"]) == (1, 3)
    assert (await client.get("/api/steps/99"))[0] == 404


async def test_an_audit_runs_on_request_and_is_remembered(client: DashboardClient) -> None:
    assert (await get(client, "/api/law"))["audit"] is None
    async with client.session.post(f"{client.url}/api/audit", json={}) as response:
        assert (await response.json())["ok"]
    assert (await get(client, "/api/run"))["audit"]["ok"]


async def test_an_audit_of_the_run_itself_is_shown(directory: RunDirectory, client: DashboardClient) -> None:
    assert (await get(client, "/api/run"))["audit"] is None
    assert audit(directory.path).ok
    found = (await get(client, "/api/law"))["audit"]
    assert found["ok"]
    assert found["at"] > 0


async def test_series_heat_map_and_tasks_are_counted(client: DashboardClient) -> None:
    series = (await get(client, "/api/series?metrics=rollout/reward,unknown/metric"))["series"]
    assert series == {
        "rollout/reward": {"x": [1.0, 2.0, 3.0], "y": [0.1, 0.2, 0.3], "low": None, "high": None, "count": 3}
    }
    by_tokens = (await get(client, "/api/series?metrics=rollout/reward&x=tokens"))["series"]["rollout/reward"]
    assert by_tokens["x"] == [4.0, 8.0, 12.0]
    heat = (await get(client, "/api/freshness"))["heat"]
    assert heat == {"steps": [1, 2, 3], "step_size": 1, "lags": [0], "counts": [[2], [2], [2]]}
    tasks = await get(client, "/api/tasks?sort=draws&like=task1")
    assert [(task["task_id"], task["draws"], task["solved_rate"]) for task in tasks["tasks"]] == [("task1", 1, 0.5)]


async def test_groups_and_tasks_are_listed_with_the_first_message_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_texts, "READ_GROUPS", 2)
    messages = (
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "Count\nto " + "ten" * KEPT_CHARS}]},
        {"role": "user", "content": "Go on."},
    )
    directory = await record_run(tmp_path / "run", change=lambda sample: replace(sample, messages=messages))
    async with serving_dashboard(str(directory.path)) as client:
        first = (await get(client, "/api/groups?order=oldest"))["groups"]
        assert sum(group["task_text"] is not None for group in first) == 2
        tasks = (await get(client, "/api/tasks"))["tasks"]
        assert sum(task["task_text"] is not None for task in tasks) == 4
        await get(client, "/api/groups?order=oldest&limit=99")
        groups = (await get(client, "/api/groups?order=oldest&limit=98"))["groups"]
    shown = next(group["task_text"] for group in groups if group["group_id"] == "task0@0")
    assert shown == f"Count\nto {'ten' * KEPT_CHARS}"[:KEPT_CHARS] + "…"
    assert {group["task_text"] for group in groups if not group["has_payload"]} == {None}


async def test_a_task_of_which_no_payload_is_stored_has_no_text(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path)) as client:
        whole = await get(client, "/api/groups?order=oldest")
    assert whole["groups"][0]["task_text"] == HOSTILE
    with sqlite3.connect(directory.ledger / FILE_NAME) as db:
        db.execute("DELETE FROM payload_places")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/groups?order=oldest")
    assert [group["task_text"] for group in found["groups"]] == [None] * len(found["groups"])


async def test_groups_and_tasks_are_filtered_by_tier(directory: RunDirectory) -> None:
    tiers = {"task0": "easy", "task1": "hard", "task2": "easy"}
    (directory.path / "tiers.json").write_text(json.dumps(tiers), encoding="utf-8")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/groups?tier=easy&order=oldest")
        assert [(group["group_id"], group["tier"]) for group in found["groups"]] == [
            ("task0@0", "easy"),
            ("task2@0", "easy"),
        ]
        assert (await get(client, "/api/groups"))["facets"]["tier"] == {"easy": 2, "hard": 1}
        assert [task["task_id"] for task in (await get(client, "/api/tasks?tier=hard"))["tasks"]] == ["task1"]
        assert (await get(client, "/api/groups?tier=none"))["total"] == 0


async def test_open_pages_are_notified_when_the_run_changes_and_then_get_its_new_values(
    directory: RunDirectory, client: DashboardClient
) -> None:
    async with client.session.get(f"{client.url}/api/events") as response:
        assert response.content_type == "text/event-stream"

        async def next_event() -> dict[str, Any]:
            async for line in response.content:
                if line.startswith(b"data: "):
                    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    return found
            raise AssertionError("the stream ended")

        assert (await next_event())["step"] == STEPS
        assert (await get(client, "/api/run"))["learning"]["reward"]["last"] == pytest.approx(0.3)
        row = {"time": 2000.0, "process": "trainer", "step": STEPS + 1, "rollout/reward": 0.9}
        with directory.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        assert (await next_event())["last"]["rollout/reward"] == 0.9
        assert (await get(client, "/api/run"))["learning"]["reward"]["last"] == 0.9


async def test_several_runs_of_a_folder_are_listed_and_compared(tmp_path: Path) -> None:
    await record_run(tmp_path / "first")
    second = await record_run(tmp_path / "later" / "second", ends=False)
    text = second.config_file.read_text(encoding="utf-8").replace("max_steps = 3", "max_steps = 4")
    second.config_file.write_text(text, encoding="utf-8")
    async with serving_dashboard(str(tmp_path)) as client:
        listed = (await get(client, "/api/runs"))["runs"]
        assert [(run["key"], run["state"]) for run in listed] == [("later/second", "stopped"), ("first", "finished")]
        compared = await get(client, "/api/compare?runs=first,later/second&metrics=rollout/reward")
        assert set(compared["series"]["rollout/reward"]) == {"first", "later/second"}
        assert compared["config"] == {"trainer.max_steps": {"first": 3, "later/second": 4}}
        assert (await client.get("/api/run?run=unknown"))[0] == 404


async def test_settings_are_shown_with_their_defaults_and_what_a_resume_changed(directory: RunDirectory) -> None:
    directory.record_resume({"trainer.max_steps": (2, STEPS)})
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/config")
    fields = {field["path"]: field for section in found["sections"] for field in section["fields"]}
    steps = fields["trainer.max_steps"]
    assert (steps["value"], steps["is_default"], steps["resumed_from"]) == (STEPS, False, 2)
    assert "steps" in steps["meaning"]
    assert fields["trainer.seed"]["is_default"]
    assert [resume["changed"] for resume in found["resumes"]] == [{"trainer.max_steps": [2, STEPS]}]


async def test_recorded_tokens_are_shown_with_their_entropy_and_the_trainers_logprob(directory: RunDirectory) -> None:
    values = np.array([np.nan, np.nan, 0.25])
    TokenRecordWriter(directory.path, every=1, kept=1).write(
        1, {("task0@0", 1, 0): TokenArrays.of(-values, values, 2 * values)}
    )
    async with serving_dashboard(str(directory.path)) as client:
        recorded = await get(client, "/api/groups/task0@0/tokens?sample=1")
        other = await get(client, "/api/groups/task0@0/tokens?sample=0")
    assert (recorded["trainer_logprob"], recorded["entropy"]) == ([None, None, -0.25], [None, None, 0.25])
    assert (recorded["advantage"], recorded["recorded_step"]) == ([None, None, 0.5], 1)
    assert (other["recorded_step"], other["entropy"]) == (None, None)


# ---------------------------------------------------------------------- runs that are damaged, incomplete or from elsewhere


async def test_a_run_without_its_ledger_is_reported_in_words(directory: RunDirectory) -> None:
    (directory.ledger / FILE_NAME).unlink()
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/run")
        assert found["state"] == "unreadable"
        assert "has no ledger.sqlite" in found["problem"]
        assert found["learning"]["reward"]["last"] == pytest.approx(0.3)
        status, reply = await client.get("/api/groups")
        assert (status, reply["error"]["type"]) == (503, "ledger_unavailable")  # type: ignore[index]


async def test_a_torn_ledger_is_reported_in_words(directory: RunDirectory) -> None:
    file = directory.ledger / FILE_NAME
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/run")
        assert found["state"] == "unreadable"
        assert "ledger" in found["problem"]


async def test_a_run_of_another_release_is_shown_without_its_configuration(directory: RunDirectory) -> None:
    with directory.config_file.open("a", encoding="utf-8") as file:
        file.write("\n[from_the_future]\nsetting = 1\n")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/run")
        assert found["progress"]["step"] == STEPS
        assert any("configuration of this run cannot be read" in problem["text"] for problem in found["problems"])
        assert (await get(client, "/api/config"))["sections"] == []


async def test_a_ledger_with_another_schema_is_reported_in_words(directory: RunDirectory) -> None:
    with sqlite3.connect(directory.ledger / FILE_NAME) as db:
        db.execute("UPDATE schema_versions SET version = 99")
    async with serving_dashboard(str(directory.path)) as client:
        assert "use the release that wrote them" in (await get(client, "/api/run"))["problem"]


async def test_deleted_payloads_are_reported(directory: RunDirectory) -> None:
    with sqlite3.connect(directory.ledger / FILE_NAME) as db:
        db.execute("DELETE FROM payload_places")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/groups/task0@0")
        assert (found["payload"], found["samples"]) == ("deleted", [])
        assert (await client.get("/api/groups/task0@0/tokens"))[0] == 404


async def test_a_damaged_index_is_built_again(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path)) as client:
        before = await get(client, "/api/groups")
    index = directory.path / "dashboard" / "index.sqlite"
    index.write_bytes(b"not a database" * 100)
    async with serving_dashboard(str(directory.path)) as client:
        assert await get(client, "/api/groups") == before


async def test_the_index_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run", ends=False)
    async with serving_dashboard(str(directory.path)) as client:
        assert (await get(client, "/api/groups?state=dispatched"))["total"] == 1
    async with serving(directory.ledger) as (_, ledger):
        owner = await ledger.join(RUN, "worker")
        opened = await ledger.open(RUN, owner, [], limit=1)
        assert [grant.group_id for grant in opened.grants] == ["task7@0"]
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/groups?state=dispatched")
        assert [(group["group_id"], group["attempt"]) for group in found["groups"]] == [("task7@0", 2)]


async def test_a_run_that_replaced_another_one_is_shown_without_groups_and_steps_of_the_old_one(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "runs" / "run")
    async with serving_dashboard(str(tmp_path / "runs")) as client:
        old = await get(client, "/api/groups?run=run&order=oldest")
        assert len((await get(client, "/api/steps?run=run"))["steps"]) == STEPS
        shutil.rmtree(directory.path)
        await record_run(directory.path, ends=False)
        first_step = directory.metrics_file.read_text(encoding="utf-8").splitlines()[0]
        directory.metrics_file.write_text(f"{first_step}\n", encoding="utf-8")
        await asyncio.sleep(SHARED_S)
        new = await get(client, "/api/groups?run=run&order=oldest")
        assert new["facets"]["state"]["dispatched"] == 1
        assert new["groups"][0]["opened_at"] > old["groups"][0]["opened_at"]
        assert [step["step"] for step in (await get(client, "/api/steps?run=run"))["steps"]] == [1]


async def test_a_run_that_is_resumed_is_shown_with_its_new_settings(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path)) as client:
        assert (await get(client, "/api/run?run=run"))["progress"]["total_steps"] == STEPS
        settings = directory.config_file.read_text(encoding="utf-8")
        directory.config_file.write_text(
            settings.replace(f"max_steps = {STEPS}", f"max_steps = {STEPS + 1}"), encoding="utf-8"
        )
        await asyncio.sleep(SHARED_S)
        assert (await get(client, "/api/run?run=run"))["progress"]["total_steps"] == STEPS + 1


async def test_the_index_is_built_again_when_its_ledger_is_replaced(tmp_path: Path) -> None:
    old, new = await record_run(tmp_path / "old"), await record_run(tmp_path / "new", ends=False)
    ledger, clock = tmp_path / "ledger", ManualClock()
    ledger.symlink_to(old.ledger)
    source = StoreSource(sqlite_url(ledger), RUN)
    async with follow(tmp_path / "index.sqlite", RUN, source, clock=clock) as index:
        while not (await index.update()).is_complete:
            pass
        ledger.unlink()
        ledger.symlink_to(new.ledger)
        clock.jump(FRESH_S)
        async with asyncio.timeout(30):
            while (await index.read(lambda found: found.facets(GroupFilter())))["state"].get("dispatched") != 1:
                await index.update()
                await asyncio.sleep(0)
        assert await index.read(lambda found: found.num_groups) == 8


async def test_each_replica_is_shown_with_its_own_address(directory: RunDirectory) -> None:
    """Also if another replica generated nothing lately."""
    write_json(directory.path / "addresses.json", {"policy": "http://a:1,http://b:1,http://c:1"})
    for name, at in (("policy", 1.0), ("policy-1", 1001.0), ("policy-2", 1001.0)):
        span = {"process": name, "name": "policy.generate", "start": at, "end": at + 1.0, "fields": {"tokens": 5}}
        directory.span_file(name).write_text(json.dumps(span) + "\n", encoding="utf-8")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/fleet")
    assert [(one["name"], one["url"]) for one in found["replicas"]] == [
        ("policy-1", "http://b:1"),
        ("policy-2", "http://c:1"),
    ]


async def test_a_failure_that_names_a_file_that_is_not_utf_8_is_shown(directory: RunDirectory) -> None:
    folder = directory.path / "failures"
    folder.mkdir(exist_ok=True)
    (folder / "1.json").write_text(json.dumps({"cause": "cannot read \udcff.txt"}), encoding="utf-8")
    async with serving_dashboard(str(directory.path)) as client:
        found = await get(client, "/api/health")
    assert [failure["cause"] for failure in found["failures"]] == ["cannot read ?.txt"]


async def test_a_page_continues_behind_a_group_that_left_the_filter(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run", ends=False)
    async with serving_dashboard(str(directory.path)) as client, serving(directory.ledger) as (_, ledger):
        await ledger.open(RUN, await ledger.join(RUN, "worker"), draws(20, 3), limit=4)
        for order, expected in (("newest", ["task20@0", "task7@0"]), ("reward", ["task22@0"])):
            first = await get(client, f"/api/groups?state=dispatched&limit=2&order={order}")
            await ledger.close(RUN, first["groups"][-1]["group_id"], DropReason(DropKind.FILTERED, "equal rewards"))
            await asyncio.sleep(FRESH_S)
            rest = await get(client, f"/api/groups?state=dispatched&order={order}&cursor={first['next_cursor']}")
            assert [group["group_id"] for group in rest["groups"]] == expected


class SlowlyFailing(StoreSource):
    async def status(self) -> LedgerStatus:
        await asyncio.sleep(2 * PATIENCE_S)
        raise TransientError("the ledger does not respond")


async def test_a_ledger_that_fails_slowly_is_reported(directory: RunDirectory) -> None:
    source = SlowlyFailing(sqlite_url(directory.ledger), RUN)
    async with follow(directory.path / "index.sqlite", RUN, source) as index:
        assert not (await index.update()).is_complete
        await asyncio.sleep(2 * PATIENCE_S)
        for _ in range(2):
            with pytest.raises(TransientError, match="does not respond"):
                await index.update()


async def test_lists_are_kept_while_the_groups_of_a_run_without_tiers_do_not_change(directory: RunDirectory) -> None:
    async with AsyncExitStack() as stack:
        catalog = open_catalog(str(directory.path))
        view = RunView(await stack.enter_async_context(catalog.open((await catalog.places())[0])), stack)
        lists = []
        for _ in range(2):
            index = await view.index()
            lists.append(await index.read(lambda found: found.list_of(GroupFilter())))
        assert lists[0] is lists[1]


async def test_a_dashboard_without_the_metrics_of_trained_steps_does_not_deny_them(directory: RunDirectory) -> None:
    async with serving(directory.ledger) as (url, _), serving_dashboard(f"{url}/v1/runs/{RUN}") as client:
        overview = await get(client, "/api/run")
        assert overview["progress"]["step"] == STEPS
        assert "its metrics are not here" in overview["flow"]["sentence"]
        assert "its metrics are not here" in (await get(client, "/api/freshness"))["cost"]["sentence"]


async def test_a_run_that_stopped_without_a_step_has_no_elapsed_time(directory: RunDirectory) -> None:
    directory.metrics_file.unlink()
    async with serving_dashboard(str(directory.path)) as client:
        assert (await get(client, "/api/run"))["progress"]["elapsed_s"] is None


async def complete(index: FollowedIndex) -> None:
    while not (await index.update()).is_complete:
        pass


async def test_an_index_that_cannot_be_written_is_reported_in_words(directory: RunDirectory) -> None:
    source = StoreSource(sqlite_url(directory.ledger), RUN)
    async with follow(directory.path / "index.sqlite", RUN, source) as index:
        await index.read(lambda found: found._db.execute("PRAGMA query_only = ON").fetchall())
        with pytest.raises(RunError, match="index of the groups cannot be written: attempt to write a readonly"):
            await complete(index)


async def test_requests_to_an_index_that_is_closed_meanwhile_have_to_be_repeated(directory: RunDirectory) -> None:
    source = SlowlyFailing(sqlite_url(directory.ledger), RUN)
    async with follow(directory.path / "index.sqlite", RUN, source) as index:
        waiting = asyncio.create_task(index.update())
        await asyncio.sleep(PATIENCE_S / 5)
    with pytest.raises(TransientError, match="repeat the request"):
        await waiting
    with pytest.raises(TransientError, match="repeat the request"):
        await index.read(lambda found: found.num_groups)


# ---------------------------------------------------------------------- who may read


async def test_every_response_forbids_foreign_scripts(client: DashboardClient) -> None:
    for path in ("/api/run", "/api/nowhere", "/", "/rollouts?state=dropped"):
        async with client.session.get(f"{client.url}{path}") as response:
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
            assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_forged_host_and_a_foreign_origin_are_refused(client: DashboardClient) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        async with client.session.get(f"{client.url}/api/run", headers=headers) as response:
            assert response.status == 403


async def test_a_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path), DashboardAccess(viewer=VIEWER)) as client:
        assert (await client.get("/api/run"))[0] == 401
        async with client.session.post(f"{client.url}/api/login", json={"token": "wrong-token-0123456789"}) as refused:
            assert refused.status == 401
        async with client.session.post(f"{client.url}/api/login", json={"token": VIEWER}) as response:
            assert response.status == 204
            cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        session = cookie.partition("=")[2].partition(";")[0]
        assert (await client.get("/api/run", headers={"Cookie": f"{COOKIE}={session}"}))[0] == 200
        assert (await client.get("/api/run", headers={"Cookie": f"{COOKIE}=operator.9999999999.00"}))[0] == 401
        assert (await client.get("/api/run", headers={"Authorization": f"Bearer {VIEWER}"}))[0] == 200


VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["0", "-1", "1:2", ":", "1e999", "nan", "0x10", "٣", "durable", "task0@0", "9" * 30, "2-1", "%00"]),
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "run",
            "metrics",
            "x",
            "from",
            "to",
            "points",
            "state",
            "drop",
            "step",
            "task",
            "task_like",
            "reward",
            "solved",
            "tokens",
            "turns",
            "lag",
            "end",
            "seconds",
            "origin",
            "producer",
            "text",
            "order",
            "limit",
            "cursor",
            "sample",
            "sequence",
            "sort",
            "like",
            "never_solved",
            "runs",
            "before",
            "target",
        ]
    ),
    VALUES,
    max_size=4,
)
ROUTES = st.one_of(
    st.sampled_from(PATHS).map(lambda path: path.partition("?")[0]),
    st.text(max_size=12).map(lambda text: f"/api/groups/{text}"),
    st.text(max_size=12).map(lambda text: f"/api/steps/{text}"),
    st.text(max_size=12).map(lambda text: f"/api/{text}"),
)


def test_no_request_causes_a_server_error(tmp_path: Path) -> None:
    async def run() -> None:
        directory = await record_run(tmp_path / "run")
        async with serving_dashboard(str(directory.path)) as client:
            loop = asyncio.get_running_loop()

            @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
            @given(route=ROUTES, parameters=PARAMETERS)
            def check(route: str, parameters: dict[str, str]) -> None:
                async def request() -> int:
                    async with client.session.get(client.url + route, params=parameters) as response:
                        await response.read()
                        return response.status

                try:
                    status = asyncio.run_coroutine_threadsafe(request(), loop).result(30)
                except (aiohttp.InvalidURL, ValueError, UnicodeError):
                    return  # this client cannot send it
                assert status < 500, (route, parameters)

            await asyncio.to_thread(check)

    asyncio.run(run())
