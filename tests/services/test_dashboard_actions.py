"""Actions of operators through the dashboard and the command line: who may act, and what the ledger records."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.contracts.admission import ActionKind
from rollbook.dashboard.server.access import COOKIE, DashboardAccess
from rollbook.ledger.stores.registry import open_reader, sqlite_url
from rollbook.ledger.tools.audit import audit
from rollbook.run.directory import RunDirectory
from tests.parts.dashboard.recorded_run import DashboardClient, record_run, serving_dashboard
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.service import serving

VIEWER = "a-token-for-viewers-0123"
OPERATOR = "a-token-for-operators-0123"
AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
PAUSE = {"kind": "pause", "author": "Ada", "note": "the reward is wrong"}


@pytest.fixture
async def directory(tmp_path: Path) -> RunDirectory:
    return await record_run(tmp_path / "run", ends=False)


def access() -> DashboardAccess:
    return DashboardAccess(viewer=VIEWER, operator=OPERATOR)


async def act(client: DashboardClient, body: object, headers: dict[str, str] = AS_OPERATOR) -> tuple[int, Any]:
    async with client.session.post(f"{client.url}/api/actions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def shown(client: DashboardClient, path: str = "/api/actions") -> Any:
    status, found = await client.get(path, headers=AS_OPERATOR)
    assert status == 200, found
    return found


def is_consistent(directory: RunDirectory) -> bool:
    with open_reader(sqlite_url(directory.ledger)) as reader:
        return audit(reader, RUN).ok


async def test_only_an_operator_can_act(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
        assert (await act(client, PAUSE, {}))[0] == 401
        assert (await act(client, PAUSE, {"Authorization": f"Bearer {VIEWER}"}))[0] == 403
        assert (await act(client, PAUSE, {**AS_OPERATOR, "Origin": "http://evil.example"}))[0] == 403
        assert (await act(client, PAUSE, {**AS_OPERATOR, "Host": "evil.example"}))[0] == 403
        assert (await shown(client))["actions"] == []
        async with client.session.post(f"{client.url}/api/login", json={"token": VIEWER}) as response:
            cookie = response.headers["Set-Cookie"].partition("=")[2].partition(";")[0]
        as_viewer = {"Cookie": f"{COOKIE}={cookie}"}
        as_operator = {"Cookie": f"{COOKIE}={cookie.replace('viewer', 'operator')}"}
        assert [(await act(client, PAUSE, headers))[0] for headers in (as_viewer, as_operator)] == [403, 401]
        assert (await act(client, PAUSE))[0] == 200


async def test_without_allow_actions_an_operator_cannot_act(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path), access()) as client:
        assert (await act(client, PAUSE))[0] == 403


async def test_on_loopback_every_request_may_read_and_only_the_operator_may_act(directory: RunDirectory) -> None:
    loopback = DashboardAccess(operator=OPERATOR)
    async with serving_dashboard(str(directory.path), loopback, allows_actions=True) as client:
        assert (await client.get("/api/run"))[0] == 200
        assert (await act(client, PAUSE, {}))[0] == 403
        assert (await act(client, PAUSE))[0] == 200


async def test_actions_are_shown_with_author_and_time_and_hold_after_a_restart(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
        for body in (
            PAUSE,
            {"kind": "quarantine", "author": "Ada", "target": "task7"},
            {"kind": "annotate", "author": "Bob", "target": "task0@0", "sample": 1, "note": "<b>odd</b>"},
            {"kind": "checkpoint", "author": "Bob"},
        ):
            status, done = await act(client, body)
            assert status == 200, done
        found = await shown(client)
        assert [(one["kind"], one["author"]) for one in found["actions"]] == [
            ("checkpoint", "Bob"),
            ("annotate", "Bob"),
            ("quarantine", "Ada"),
            ("pause", "Ada"),
        ]
    async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
        run = await shown(client, "/api/run")
        assert (run["actions"]["paused"], run["actions"]["quarantined"], run["actions"]["checkpoint_requested"]) == (
            True,
            ["task7"],
            3,
        )
        assert {"paused", "quarantined"} <= {problem["kind"] for problem in run["problems"]}
        assert run["law"]["dropped"] == {"filtered": 1, "quarantined": 1}
        notes = (await shown(client, "/api/actions?target=task0@0"))["actions"]
        assert [(note["sample"], note["note"]) for note in notes] == [(1, "<b>odd</b>")]
    assert is_consistent(directory)


async def test_actions_on_a_ledger_service_are_done_and_refused_by_the_service(directory: RunDirectory) -> None:
    async with (
        serving(directory.ledger) as (url, _),
        serving_dashboard(f"{url}/v1/runs/{RUN}", access(), allows_actions=True) as client,
    ):
        status, done = await act(client, PAUSE)
        assert (status, done.get("kind")) == (200, "pause"), done
        refused, error = await act(client, {"kind": "readmit", "author": "Ada", "target": "task1"})
        assert (refused, "not in quarantine" in error["error"]["message"]) == (409, True)
    assert is_consistent(directory)


async def test_an_action_is_a_mark_on_the_timeline(directory: RunDirectory) -> None:
    span = {"process": "trainer", "name": "trainer.train", "start": 1001.0, "end": 4e9, "id": 1, "parent": None}
    directory.span_file("trainer").write_text(json.dumps({**span, "fields": {}}) + "\n", encoding="utf-8")
    async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
        await act(client, PAUSE)
        marks = [mark for mark in (await shown(client, "/api/timeline"))["marks"] if mark["kind"] == "action"]
        assert [mark["label"] for mark in marks] == ["pause by Ada the reward is wrong"]


async def test_an_action_that_the_ledger_refuses_says_why(directory: RunDirectory) -> None:
    async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
        for body, status, message in (
            ({"kind": "annotate", "author": "Ada", "target": "nothing@0", "note": "x"}, 404, "no group"),
            ({"kind": "annotate", "author": "Ada", "target": "task0@0", "note": ""}, 409, "empty"),
            ({"kind": "pause", "author": " "}, 409, "author"),
            ({"kind": "explode", "author": "Ada"}, 400, "explode"),
            ({"kind": "drained", "author": "Ada"}, 403, "not possible"),
        ):
            found = await act(client, body)
            assert (found[0], message in found[1]["error"]["message"]) == (status, True), found
        assert (await shown(client))["actions"] == []


def test_no_action_request_causes_a_server_error(tmp_path: Path) -> None:
    bodies = st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from([kind.value for kind in ActionKind] + ["", "x"]),
            "author": st.text(max_size=6),
            "target": st.text(max_size=6) | st.sampled_from(["task0", "task0@0"]),
            "sample": st.none() | st.integers(-2, 2**70),
            "note": st.text(max_size=6),
        },
    )

    async def run() -> None:
        directory = await record_run(tmp_path / "run", ends=False)
        async with serving_dashboard(str(directory.path), access(), allows_actions=True) as client:
            loop = asyncio.get_running_loop()

            @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
            @given(body=bodies)
            def check(body: dict[str, object]) -> None:
                status, found = asyncio.run_coroutine_threadsafe(act(client, body), loop).result(30)
                assert status < 500, (body, found)

            await asyncio.to_thread(check)
        assert is_consistent(directory)

    asyncio.run(run())


async def test_the_command_line_acts_on_a_stopped_run(directory: RunDirectory) -> None:
    def rollbook(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollbook", "act", str(directory.path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = await asyncio.to_thread(rollbook, "annotate", "task0@0", "--note", "it guesses", "--author", "Ada", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["note"] == "it guesses"
    refused = await asyncio.to_thread(rollbook, "explode")
    assert (refused.returncode, "quarantine" in refused.stderr) == (2, True)
