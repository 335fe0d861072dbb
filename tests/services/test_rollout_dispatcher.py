"""The dispatcher with real worker processes and a real ledger."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.admission import OpenReply
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason, GroupId, group_id
from rollbook.contracts.task import Task, TaskId
from rollbook.rollout.dispatch.failure_breaker import RolloutsFailingError
from rollbook.rollout.dispatch.outcome_follower import OutcomeFollower
from rollbook.rollout.workers.pool import WorkersDyingError
from rollbook.tasks.cursor import CursorDataLoader
from rollbook.telemetry.metrics import read_metrics
from tests.parts.concurrency.processes import descendants_running
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.sink import PUBLICATION, LedgerSink, open_sink

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[LedgerSink]:
    async with open_sink(tmp_path) as opened:
        yield opened


def living_children() -> list[psutil.Process]:
    return descendants_running("rollbook.rollout.workers.main")


async def test_every_draw_is_played_and_stored_and_exhaustion_is_reported(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{}] * 10, epochs=2, workers=2, sink=sink)
    await play.run()
    assert sink.was_exhausted
    assert sorted(sink.rows) == sorted(f"t{i}@{draw}" for i in range(10) for draw in range(2))
    assert {row.state for row in sink.rows.values()} == {"queued"}
    assert {row.attempt for row in sink.rows.values()} == {1}
    groups = [one.group for one in sink.submitted.values()]
    assert len(groups) == 20
    assert all(len(group.samples) == 4 for group in groups)
    assert all(group.trained_publications() == {PUBLICATION} for group in groups)
    assert play.tasks.position == 20
    spans = play.spans()
    assert sorted(span.fields["group_id"] for span in spans) == sorted(sink.rows)
    assert all(span.fields["samples"] == 4 for span in spans)
    episodes = play.spans("rollout.episode")
    assert sorted(span.fields["group_id"] for span in episodes) == sorted(list(sink.rows) * 4)
    assert all(span.fields["reward"] is not None and span.start <= span.end for span in episodes)
    assert living_children() == []


async def test_two_dispatchers_share_a_source_and_every_draw_is_played_once(tmp_path: Path, sink: LedgerSink) -> None:
    sink.limit(capacity=4)
    first, second = (
        dispatching(tmp_path / name, [{}] * 12, sink=sink, name=name, worker={"delay_s": 0.02}) for name in ("a", "b")
    )
    await asyncio.gather(first.run(), second.run())
    assert {(row.state, row.attempt) for row in sink.rows.values()} == {("queued", 1)}
    played = [len(one.spans()) for one in (first, second)]
    assert sum(played) == len(sink.rows) == 12
    assert [one.tasks.state().unsettled for one in (first, second)] == [0, 0], (
        "draws of the other dispatcher are not waited for"
    )


async def test_a_dispatcher_that_is_behind_the_others_continues_where_they_are(
    tmp_path: Path, sink: LedgerSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first request of this dispatcher, another one has opened and settled 200 draws."""
    sink.limit(capacity=4, wanted=201)
    num_requests = 0
    open_groups = sink.open

    async def settle_draws_of_another() -> None:
        other = await sink.join("other")
        tasks = CursorDataLoader([Task(id=TaskId(f"t{at}"), row={}) for at in range(8)], epochs=None, shuffle=False)
        for _ in range(50):
            opened = await open_groups(other, tasks.propose(4), limit=4)
            tasks.taken(opened.taken)
            for grant in opened.grants:
                await sink.close(grant.group_id, DropReason(DropKind.INVALID, "of another dispatcher"))

    async def open_and_count(*args: Any, **kwargs: Any) -> OpenReply:
        nonlocal num_requests
        num_requests += 1
        if num_requests == 1:
            await settle_draws_of_another()
        reply: OpenReply = await open_groups(*args, **kwargs)
        return reply

    monkeypatch.setattr(sink, "open", open_and_count, raising=False)
    await dispatching(tmp_path, [{}] * 8, sink=sink, epochs=None).run(within_s=60)
    assert min(row.position or 0 for row in sink.rows.values() if row.state == "queued") == 200
    assert num_requests < 10, "one request for each few draws would take 50"


async def test_without_a_curriculum_the_played_draws_are_not_kept_in_memory(sink: LedgerSink) -> None:
    task = Task(id=TaskId("t"), row={})
    follower = OutcomeFollower(CursorDataLoader([task]), sink)
    tracemalloc.start()
    try:
        for draw in range(20_000):
            follower.started(group_id(task.id, draw))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 500_000


async def test_only_the_groups_of_a_killed_worker_are_played_again(tmp_path: Path, sink: LedgerSink) -> None:
    rows = [{"action": "die_once", "marker": str(tmp_path / "died")}, *[{}] * 7]
    play = dispatching(tmp_path, rows, worker={"delay_s": 0.02}, sink=sink)
    await play.run()
    assert {row.state for row in sink.rows.values()} == {"queued"}
    assert sink.rows[GroupId("t0@0")].attempt == 2
    assert {attempt for _, attempt, _ in sink.released} == {1}
    assert all("killed by signal 9" in cause for _, _, cause in sink.released)
    assert len(play.events("rollout.worker_died")) == 1
    assert living_children() == []


async def test_failed_groups_are_dropped_with_their_causes_and_the_run_continues(
    tmp_path: Path, sink: LedgerSink
) -> None:
    failing: list[dict[str, Any]] = [{"action": action} for action in ("raise", "wrong", "none")]
    good: list[dict[str, Any]] = [{}]
    play = dispatching(tmp_path, good * 4 + failing + good * 4, sink=sink.limit(capacity=1))
    await play.run()
    dropped = {gid: row.drop_reason or "" for gid, row in sink.rows.items() if row.drop_reason is not None}
    assert sorted(dropped) == ["t4@0", "t5@0", "t6@0"]
    reasons = list(dropped.values())
    assert reasons[0].startswith("invalid: ")
    assert "4 x rollout raised ValueError: row is malformed" in reasons[0]
    assert "4 x rollout returned a int" in reasons[1]
    assert reasons[2].startswith("filtered: declined")
    assert len(play.events("rollout.group_failed")) == 3


async def test_while_no_policy_server_has_weights_groups_are_released_and_no_other_is_opened(
    tmp_path: Path, sink: LedgerSink
) -> None:
    """A trainer that starts may replay for longer than the deadline of a group. That must neither drop groups nor stop the run."""
    weights = tmp_path / "weights"
    opened_before: list[int] = []

    async def until_served() -> None:
        opened_before.append(len(sink.rows))
        if len(opened_before) == 2:
            weights.touch()

    rows = [{"action": "no_weights", "marker": str(weights)}] * 12
    sink.limit(capacity=6, deadline_s=4.0)
    play = dispatching(tmp_path, rows, sink=sink, until_served=until_served)
    await play.run()
    assert opened_before[:2] == [0, 6], "asked before the first group, and before the next ones after a deadline"
    assert {row.state for row in sink.rows.values()} == {"queued"}
    assert {row.attempt for row in sink.rows.values()} == {1, 2}
    assert {cause for _, _, cause in sink.released} == {"deadline"}
    assert play.events("rollout.group_failed") == []


async def test_a_rollout_that_always_fails_stops_the_run_with_its_cause(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{"action": "raise"}] * 50, sink=sink)
    cause = r'(?s)5 groups in a row failed.*row is malformed.*functions\.py", line \d+, in rollout.*See'
    with pytest.raises(RolloutsFailingError, match=cause):
        await play.run()
    assert len(play.events("rollout.group_failed")) >= 5
    assert living_children() == []


async def test_a_run_error_of_user_code_stops_the_run(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{}, {"action": "stop_run"}], sink=sink)
    with pytest.raises(RunError, match="the licence of the grader expired"):
        await play.run()


async def test_workers_that_keep_dying_stop_the_run_with_their_last_output(
    tmp_path: Path, sink: LedgerSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbook.rollout.workers.pool.MAX_BARREN_DEATHS", 1)
    play = dispatching(tmp_path, [{"action": "die"}], sink=sink)
    with pytest.raises(WorkersDyingError, match=r"(?s)2 rollout workers died.*status 9.*output of the dying worker"):
        await play.run()


@pytest.mark.parametrize(
    ("config", "worker", "message"),
    [
        ({"function": "no_such_rollout"}, {}, "no module 'no_such_rollout'"),
        ({"filter": "tests.parts.rollout.functions:absent"}, {}, "has no 'absent'"),
        ({"settings": {}, "function": "chat"}, {"user": {"typo": 1}}, "typo"),
    ],
)
async def test_a_faulty_setup_stops_the_run_before_anything_is_opened(
    tmp_path: Path, sink: LedgerSink, config: dict[str, Any], worker: dict[str, Any], message: str
) -> None:
    play = dispatching(tmp_path, [{}], worker=worker, **config, sink=sink)
    with pytest.raises(RunError, match=message):
        await play.run()
    assert sink.rows == {}, "nothing is opened before a worker is ready"


async def test_a_hanging_group_is_released_at_its_deadline(tmp_path: Path, sink: LedgerSink) -> None:
    sink.limit(capacity=8, deadline_s=2.0, max_attempts=1)
    play = dispatching(tmp_path, [{"action": "hang"}, {}], sink=sink)
    await play.run()
    assert [(gid, cause) for gid, _, cause in sink.released] == [("t0@0", "deadline")]
    # The ledger knows the deadline too, and may be the first to end the attempt.
    reasons = ("attempts: attempt 1: deadline", "timeout: attempt 1 passed its deadline")
    assert sink.rows[GroupId("t0@0")].drop_reason in reasons
    assert play.tasks.state().unsettled == 0, "a dropped group is not waited for"
    assert sink.rows[GroupId("t1@0")].state == "queued"


async def test_a_group_past_its_deadline_is_logged_with_its_age_and_the_stacks_of_its_episodes(
    tmp_path: Path, sink: LedgerSink
) -> None:
    sink.limit(capacity=1, deadline_s=2.0, max_attempts=1, wanted=1_000_000)
    play = dispatching(tmp_path, [{"action": "hang"}], sink=sink, epochs=None)
    running = asyncio.create_task(play.run())
    async with asyncio.timeout(60):
        while not (events := play.events("rollout.group_stalled")):  # noqa: ASYNC110  # a file cannot be awaited
            await asyncio.sleep(0.05)
    await sink.end()
    await running
    stalled = events[0]
    assert (stalled["group_id"], stalled["attempt"]) == ("t0@0", 1)
    assert stalled["age_s"] > 0
    assert "rollout.sample.t0@0.3" in stalled["stack"]
    assert "rollout/functions.py" in stalled["stack"]


async def test_a_new_attempt_replaces_one_whose_lease_expired(tmp_path: Path, sink: LedgerSink) -> None:
    marker = tmp_path / "hangs"
    play = dispatching(tmp_path, [{"action": "hang_once", "marker": str(marker)}, {}], sink=sink)
    running = asyncio.create_task(play.run())
    await sink.until(lambda: any(row.state == "queued" for row in sink.rows.values()))
    await sink.expire(GroupId("t0@0"))
    await running
    assert {gid: (row.state, row.attempt) for gid, row in sink.rows.items()} == {
        "t0@0": ("queued", 2),
        "t1@0": ("queued", 1),
    }
    assert sink.released == [], "an expired attempt is not released"
    assert [span.fields["attempt"] for span in play.spans() if span.fields["group_id"] == "t0@0"] == [2]


async def test_a_worker_with_a_blocked_event_loop_is_replaced(tmp_path: Path, sink: LedgerSink) -> None:
    sink.limit(capacity=8, max_attempts=1)
    play = dispatching(tmp_path, [{"action": "block"}], sink=sink, worker_silence_s=2.5, worker_stop_s=0.2)
    await play.run()
    assert "sent no heartbeat" in sink.released[0][2]


async def test_the_end_of_the_run_stops_running_groups(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{}, {"action": "hang"}], sink=sink.limit(capacity=8, wanted=1))
    await play.run(within_s=30)
    assert sink.rows[GroupId("t1@0")].state == "dispatched"
    assert living_children() == []


async def test_the_end_of_the_run_is_noticed_when_every_slot_is_taken(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{"action": "hang"}] * 8, sink=sink.limit(capacity=8))
    running = asyncio.create_task(play.run(within_s=30))
    await sink.until(lambda: len(sink.rows) == 8)
    await sink.end()
    await running


async def test_a_dispatcher_that_leaves_finishes_its_groups_and_opens_no_more(tmp_path: Path, sink: LedgerSink) -> None:
    sink.limit(capacity=4, wanted=1_000_000)
    play = dispatching(tmp_path, [{}] * 8, sink=sink, epochs=None, worker={"delay_s": 0.05})
    running = asyncio.create_task(play.run())
    await sink.until(lambda: any(row.state == "queued" for row in sink.rows.values()))
    play.dispatcher.leave()
    await running
    assert {(row.state, row.attempt) for row in sink.rows.values()} == {("queued", 1)}
    assert sink.released == []
    assert living_children() == []


@pytest.mark.parametrize("end", ["leave", "end of the run"])
async def test_a_dispatcher_that_waits_for_weights_can_end(tmp_path: Path, sink: LedgerSink, end: str) -> None:
    is_waiting = asyncio.Event()

    async def until_served() -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    play = dispatching(tmp_path, [{}] * 8, sink=sink, until_served=until_served)
    running = asyncio.create_task(play.run(within_s=20))
    await is_waiting.wait()
    if end == "leave":
        play.dispatcher.leave()
    else:
        await sink.end()
    await running
    assert sink.rows == {}
    assert living_children() == []


async def test_a_cancelled_dispatcher_releases_nothing_and_the_next_one_takes_over(
    tmp_path: Path, sink: LedgerSink
) -> None:
    play = dispatching(tmp_path, [{"action": "hang"}, {}, {}], sink=sink)
    running = asyncio.create_task(play.run())
    await sink.until(lambda: sum(row.state == "queued" for row in sink.rows.values()) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sink.released == []
    assert sink.rows[GroupId("t0@0")].state == "dispatched"
    assert living_children() == []
    again = dispatching(tmp_path, [{}, {}, {}], sink=sink)
    await again.run()
    assert {gid: (row.state, row.attempt) for gid, row in sink.rows.items()} == {
        "t0@0": ("queued", 2),
        "t1@0": ("queued", 1),
        "t2@0": ("queued", 1),
    }


async def test_an_unreachable_ledger_ends_the_dispatcher_and_the_next_one_continues(
    tmp_path: Path, sink: LedgerSink
) -> None:
    sink.fail_next.append(TransientError("connection refused"))
    with pytest.raises(TransientError, match="connection refused"):
        await dispatching(tmp_path, [{}] * 3, sink=sink).run()
    assert living_children() == []
    await dispatching(tmp_path, [{}] * 3, sink=sink).run()
    assert {row.state for row in sink.rows.values()} == {"queued"}


async def test_a_fenced_dispatcher_stops(tmp_path: Path, sink: LedgerSink) -> None:
    sink.fail_next.append(FencedError("a newer dispatcher joined"))
    play = dispatching(tmp_path, [{}] * 3, sink=sink)
    with pytest.raises(FencedError):
        await play.run()


async def test_metrics_are_dense_and_add_up(tmp_path: Path, sink: LedgerSink) -> None:
    play = dispatching(tmp_path, [{}] * 20, worker={"delay_s": 0.1}, sink=sink.limit(capacity=4))
    await play.run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows
    assert sum(row["rollout/groups_finished"] for row in rows) == 20
    assert rows[-1]["rollout/accepted_groups"] == 20
    assert any(row["async/in_flight"] > 0 for row in rows)
    measured = next(row for row in rows if row["rollout/groups_finished"])
    assert 0 <= measured["rollout/raw_accuracy"] <= 1
    assert measured["rollout/turns"] >= 1
    assert measured["rollout/response_len"] >= 2
