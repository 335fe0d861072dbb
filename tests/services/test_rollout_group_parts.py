"""Groups in parts through a real ledger: the dispatcher, a worker process that is killed, and a dispatcher that is replaced."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.group_codec import decode_group
from rollbook.contracts.trajectory import RolloutSample
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.records import GroupRecord
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_run
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.rewards.scorer import case_of
from rollbook.telemetry.events import EventLog
from tests.parts.concurrency.until import until
from tests.parts.ledger.service import serving
from tests.parts.rollout.dispatching import Dispatching, dispatching
from tests.parts.rollout.rewards import compared

pytestmark = pytest.mark.usefixtures("forked_processes")

RUN = RunId("parts")
RULE = FreshnessRule(
    groups_per_step=8,
    max_in_flight=4,
    max_head_offpolicy_versions=1,
    policy=BatchPolicy.PARTS,
    samples_per_group=4,
    quorum=2,
)


@dataclass
class Run:
    """A run whose gate is open, with the tasks of a test."""

    ledger: Ledger
    client: LedgerClient
    directory: Path
    publication: int

    def play(self, name: str, rows: list[dict[str, Any]], **config: Any) -> Dispatching:
        return dispatching(
            self.directory / name,
            rows,
            sink=self.client,
            rule=RULE,
            worker={"publication": self.publication},
            quorum=2,
            **config,
        )

    async def parts(self) -> list[GroupRecord]:
        return await self.ledger.read(
            lambda tx: sorted(tx.groups.page(RUN, start=0, limit=100, state=None), key=lambda g: (g.sequence, g.part))
        )

    async def until(self, is_reached: Callable[[list[GroupRecord]], bool]) -> list[GroupRecord]:
        async with asyncio.timeout(90):
            while not is_reached(found := await self.parts()):  # noqa: ASYNC110 - the ledger is polled as by a client
                await asyncio.sleep(0.02)
        return found

    async def require_complete(self, samples: int) -> None:
        counts = (await self.client.status()).samples
        assert counts is not None
        assert (counts.expected, counts.stored, counts.open, sum(counts.missing.values())) == (samples, samples, 0, 0)
        report = await self.ledger.read(lambda tx: audit_run(tx, RUN))
        assert report.violations == ()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    log = EventLog("test")
    async with (
        serving(tmp_path / "ledger") as (url, ledger),
        open_ledger_client(url, RUN, request_s=30, log=log) as client,
    ):
        await ledger.create_run(RUN, RunSettings(rule=RULE, owner_ttl_s=5.0))
        await client.take_role(restored_step=0)
        publication = await client.register(0, "weights")
        await client.confirm(publication)
        yield Run(ledger, client, tmp_path, publication.id)


@asynccontextmanager
async def playing(play: Dispatching) -> AsyncIterator[None]:
    """The dispatcher runs until the end of the block, then it is stopped like by a kill: nothing is handed over."""
    task = asyncio.create_task(play.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_stored(parts: list[GroupRecord], samples: int) -> bool:
    return sum(part.num_samples for part in parts if part.state is GroupState.QUEUED) == samples


async def test_fast_samples_do_not_wait_for_a_slow_one_and_all_are_stored_once(run: Run) -> None:
    marker = run.directory / "slow"
    play = run.play("first", [{"action": "late_once", "marker": str(marker)}, {}])
    async with playing(play):
        # The dispatcher settles a group after the ledger has stored it.
        waiting = await run.until(lambda parts: is_stored(parts, 7) and play.tasks.state().unsettled < 2)
        late = next(part for part in waiting if part.state is GroupState.DISPATCHED)
        assert (late.group_id.startswith("t0@0/"), late.expected_samples, late.attempt) == (True, 1, 1)
        assert play.tasks.state().unsettled == 1, "the cursor waits for the last part"
        (run.directory / "slow.go").touch()
        parts = await run.until(lambda found: is_stored(found, 8) and play.tasks.state().unsettled == 0)
        await run.require_complete(samples=8)
    slow = [part for part in parts if part.task_id == "t0"]
    assert [part.part for part in slow] == list(range(1, len(slow) + 1))
    assert {part.baseline for part in slow} == {slow[0].baseline}
    assert len(slow[0].baseline or ()) == 2
    assert {part.attempt for part in parts} == {1}


async def test_after_the_death_of_a_worker_only_the_missing_samples_are_played_again(run: Run) -> None:
    marker = run.directory / "dying"
    play = run.play("first", [{"action": "die_late_once", "marker": str(marker)}])
    async with playing(play):
        before = await run.until(lambda parts: is_stored(parts, 3))
        (run.directory / "dying.go").touch()
        after = await run.until(lambda parts: is_stored(parts, 4))
        await run.require_complete(samples=4)
        # Spans are recorded after the ledger has stored the group.
        await until(lambda: len(play.spans("rollout.episode")) >= 4)
    assert [part.payload_digest for part in after[: len(before) - 1]] == [p.payload_digest for p in before[:-1]]
    assert (after[-1].attempt, after[-1].num_samples) == (2, 1)
    assert after[-1].baseline == after[0].baseline
    assert len(play.spans("rollout.episode")) == 4, "one of them in the second attempt"
    (released,) = play.events("rollout.group_released")
    assert released["group_id"] == after[-1].group_id


async def test_a_late_sample_is_compared_with_the_stored_quorum_even_after_the_death_of_its_worker(run: Run) -> None:
    rewards = {"functions": {"compared": {"path": "tests.parts.rollout.rewards:compared", "group": True}}}
    rows: list[dict[str, Any]] = [{"action": "die_late_once", "marker": str(run.directory / "dying")}, {}]
    async with playing(run.play("first", rows, rewards=rewards)):
        before = await run.until(lambda parts: is_stored(parts, 7))
        (run.directory / "dying.go").touch()
        after = await run.until(lambda parts: is_stored(parts, 8))
        await run.require_complete(samples=8)
    digests = {part.group_id: part.payload_digest for part in after}
    assert all(digests[part.group_id] == part.payload_digest for part in before if part.num_samples)
    assert {part.attempt for part in after if part.group_id.startswith("t0@0/")} >= {2}
    groups = [decode_group(await run.client.payload(part.group_id)) for part in after]
    for task in ("t0", "t1"):
        samples = [sample for group in groups if group.task_id == task for sample in group.samples]
        quorum, late = samples[:2], samples[2:]
        assert [sample.facts["compared"] for sample in quorum] == ["with its group"] * 2
        assert [sample.reward for sample in quorum] == compared([case_of_stored(sample) for sample in quorum])
        for sample in late:
            assert sample.facts["compared"] == "with the quorum of its group"
            known = [dataclasses.replace(case_of_stored(one), score=one.reward) for one in quorum]
            assert sample.reward == compared([*known, case_of_stored(sample)])[-1]


def case_of_stored(sample: RolloutSample) -> RewardCase:
    case = case_of({}, sample, decode=str)
    return dataclasses.replace(case, reward=sample.metrics["reward/environment"])


async def test_a_dispatcher_that_replaces_another_continues_with_the_missing_samples(run: Run) -> None:
    marker = run.directory / "slow"
    rows: list[dict[str, Any]] = [{"action": "late_once", "marker": str(marker)}]
    async with playing(run.play("first", rows)):
        await run.until(lambda parts: is_stored(parts, 3))
    (run.directory / "slow.go").touch()
    second = run.play("second", rows)
    async with playing(second):
        parts = await run.until(lambda found: is_stored(found, 4))
        await run.require_complete(samples=4)
        # The span is recorded after the ledger has stored the group.
        await until(lambda: len(second.spans("rollout.episode")) > 0)
    assert (parts[-1].attempt, parts[-1].num_samples) == (2, 1)
    assert len(second.spans("rollout.episode")) == 1
    past = await run.client.outcomes(after=-1, limit=10)
    assert [(draw.group_id, draw.outcome is not None and draw.outcome.num_samples) for draw in past] == [
        (GroupId("t0@0"), 4)
    ]


async def test_samples_that_will_not_come_are_missing_with_the_reason(run: Run) -> None:
    play = run.play("first", [{"action": "none"}, {}])
    async with playing(play):
        await run.until(lambda parts: is_stored(parts, 4))
        parts = await run.until(lambda found: any(part.state is GroupState.DROPPED for part in found))
    (dropped,) = [part for part in parts if part.state is GroupState.DROPPED]
    assert (dropped.drop_reason or "").startswith("filtered: declined")
    counts = (await run.client.status()).samples
    assert counts is not None
    assert (counts.expected, counts.stored, dict(counts.missing)) == (8, 4, {"filtered": 4})
