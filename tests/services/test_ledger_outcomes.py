"""Outcomes of past draws over HTTP, and a curriculum that is rebuilt from them."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from rollbook.contracts.admission import Grant, OwnerId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.task import Draw
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import wire
from rollbook.ledger.service import Ledger
from rollbook.rollout.dispatch import outcome_follower
from rollbook.rollout.dispatch.outcome_follower import OutcomeFollower
from rollbook.tasks.curriculum import Curriculum
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, group_of, outcome_of, settings
from tests.parts.ledger.service import serving
from tests.parts.tasks.curriculum import outcome, rules, tiered


class Service:
    def __init__(self, url: str, ledger: Ledger, client: LedgerClient) -> None:
        self.url = url
        self.ledger = ledger
        self.client = client


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(outcome_follower, "PAGE", 7)
    async with AsyncExitStack() as stack:
        url, ledger = await stack.enter_async_context(serving(tmp_path))
        await ledger.create_run(RUN, settings(per_step=100, in_flight=50))
        role = await ledger.take_role(RUN, restored_step=0)
        publication = await ledger.register(RUN, 0, "initial", epoch=role.epoch)
        await ledger.confirm(RUN, publication, epoch=role.epoch)
        log = EventLog("test", echo=sys.stdout)
        client = await stack.enter_async_context(open_ledger_client(url, RUN, request_s=10.0, log=log))
        yield Service(url, ledger, client)


async def test_outcomes_of_past_draws_are_paged(service: Service) -> None:
    client = service.client
    owner = await client.join("worker")
    await client.open(owner, draws(0, 4), limit=4)
    group = group_of("task1")
    await client.submit(encode_group(group, outcome=outcome_of(group)))
    await client.close(GroupId("task2@0"), DropReason(DropKind.FILTERED, "all alike"), outcome=outcome(1.0))
    await client.close(GroupId("task3@0"), DropReason(DropKind.INVALID, "env"))
    foreign = group_of("elsewhere")
    await client.submit(encode_group(foreign, outcome=outcome_of(foreign)))

    pages = [await client.outcomes(after=after, limit=3) for after in (-1, 2, 4)]
    assert [len(page) for page in pages] == [3, 2, 0]
    past = [*pages[0], *pages[1]]
    assert [draw.group_id for draw in past] == ["task0@0", "task1@0", "task2@0", "task3@0", "elsewhere@0"]
    assert [draw.sequence for draw in past] == [0, 1, 2, 3, 4]
    assert [draw.position for draw in past] == [0, 1, 2, 3, None]
    assert [draw.state for draw in past] == [
        GroupState.DISPATCHED,
        GroupState.QUEUED,
        GroupState.DROPPED,
        GroupState.DROPPED,
        GroupState.QUEUED,
    ]
    assert [draw.outcome for draw in past] == [None, outcome_of(group), outcome(1.0), None, outcome_of(foreign)]
    assert past == await service.ledger.outcomes(RUN, after=-1, limit=100)


async def test_changes_name_the_groups_that_changed_since_the_last_request(service: Service) -> None:
    client = service.client
    begin = (await client.changes(after=None)).next
    owner = await client.join("worker")
    await client.open(owner, draws(0, 3), limit=3)
    opened = await client.changes(after=begin)
    assert [(group.group_id, group.state) for group in opened.groups] == [
        (f"task{number}@0", GroupState.DISPATCHED) for number in range(3)
    ]
    group = group_of("task1")
    await client.submit(encode_group(group, outcome=outcome_of(group)))
    later = await client.changes(after=opened.next)
    assert [(view.group_id, view.state, view.outcome) for view in later.groups] == [
        ("task1@0", GroupState.QUEUED, outcome_of(group))
    ]
    assert later.is_complete
    assert await client.changes(after=later.next) == wire.ChangesView(next=later.next, is_complete=True, groups=())


async def test_changes_are_paged(service: Service) -> None:
    client = service.client
    owner = await client.join("worker")
    await client.open(owner, draws(0, 5), limit=5)
    found, after, is_complete = [], 0, False
    while not is_complete:
        page = await client.changes(after=after, limit=2)
        found += [group.group_id for group in page.groups]
        after, is_complete = page.next, page.is_complete
    assert found == [f"task{number}@0" for number in range(5)]


async def test_invalid_query_parameters_are_rejected(service: Service) -> None:
    with pytest.raises(RunError, match="at least 1"):
        await service.client.outcomes(after=-1, limit=0)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{service.url}/v1/runs/{RUN}/outcomes?from=soon") as response,
    ):
        assert response.status == 422
        assert "`$.from`" in (await response.json())["message"]


async def test_outcomes_can_be_read_as_json(service: Service) -> None:
    owner = await service.client.join("worker")
    await service.client.open(owner, draws(0, 1), limit=1)
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/v1/runs/{RUN}/outcomes") as response:
        (past,) = await response.json()
    assert (past["task_id"], past["state"], past["outcome"]) == ("task0", "dispatched", None)


async def test_a_curriculum_is_rebuilt_from_the_ledger(service: Service) -> None:
    """Draws overlap and their results arrive out of order. The second curriculum knows only the ledger."""
    tasks, chosen = tiered(3, 3), rules(promote_tries=4)
    live = Curriculum(tasks, chosen, seed=5)
    owner = await service.client.join("dispatcher")
    in_flight: list[Draw] = []
    for turn in range(30):
        in_flight += await opened(service.client, owner, live, 2)
        # Alternate between the oldest and the newest draw, so that results arrive out of order.
        draw = in_flight.pop(turn % 2 - 1)
        success = float(draw.task_id in ("a0", "a1", "a2", "b1"))
        reason = DropReason(DropKind.FILTERED, "all alike")
        result = outcome(success)
        await service.client.close(GroupId(f"{draw.task_id}@{draw.number}"), reason, outcome=result)
        live.observe(GroupId(f"{draw.task_id}@{draw.number}"), draw.position, result)

    again = Curriculum(tasks, chosen, seed=5)
    again.rebuild(await service.client.progress())
    await OutcomeFollower(again, service.client).update()
    assert again.view() == live.view()
    assert [tier.is_open for tier in again.view().tiers] == [True, True]
    assert again.propose(10) == live.propose(10)
    assert [d.position for d in again.propose(1)] == [60]


@pytest.mark.parametrize("seed", range(6))
async def test_the_curricula_of_two_dispatchers_count_every_outcome_of_both_once(service: Service, seed: int) -> None:
    """Each opens, releases and settles draws at random moments, and follows the other at random moments."""
    rng = random.Random(seed)
    tasks, chosen = tiered(3, 3), rules(promote_tries=4, task_window=100)
    sides = [await Side.open(service.client, name, Curriculum(tasks, chosen, seed=5)) for name in ("a", "b")]
    for _ in range(60):
        side = rng.choice(sides)
        await side.propose(rng.choice((1, 2)))
        for _ in range(rng.choice((0, 1, 2))):
            if side.playing:
                grant = side.playing.pop(rng.randrange(len(side.playing)))
                await (side.release(grant) if rng.random() < 0.2 else side.settle(grant, rng.choice((0.0, 1.0, None))))
        if rng.random() < 0.3:
            await side.follower.update()
    for side in sides:
        while side.playing:
            await side.settle(side.playing.pop(), 1.0)
    await asyncio.gather(*(side.follower.update() for side in sides))

    again = Curriculum(tasks, chosen, seed=5)
    again.rebuild(await service.client.progress())
    await OutcomeFollower(again, service.client).update()
    for task in tasks:
        expected = sorted(again.mastery(task.id).results)
        assert [sorted(side.curriculum.mastery(task.id).results) for side in sides] == [expected, expected]
    assert sum(len(again.mastery(task.id).results) for task in tasks) > 30


@dataclass
class Side:
    """A dispatcher, as far as its curriculum is concerned."""

    client: LedgerClient
    owner: OwnerId
    curriculum: Curriculum
    follower: OutcomeFollower
    playing: list[Grant] = field(default_factory=list)

    @classmethod
    async def open(cls, client: LedgerClient, name: str, curriculum: Curriculum) -> "Side":
        owner = await client.join(name)
        curriculum.rebuild(await client.progress())
        return cls(client, owner, curriculum, OutcomeFollower(curriculum, client))

    async def propose(self, count: int) -> None:
        proposed = self.curriculum.propose(count)
        reply = await self.client.open(self.owner, proposed, limit=count)
        self.curriculum.taken(reply.taken)
        granted = {grant.group_id for grant in reply.grants}
        for draw in proposed[: reply.taken]:
            if (name := GroupId(f"{draw.task_id}@{draw.number}")) not in granted:
                self.curriculum.observe(name, draw.position, None)
        for grant in reply.grants:
            self.follower.started(grant.group_id)
        self.playing += reply.grants

    async def release(self, grant: Grant) -> None:
        await self.client.release(grant.group_id, attempt=grant.attempt, cause="its worker died")
        self.follower.released(grant.group_id)

    async def settle(self, grant: Grant, success: float | None) -> None:
        result = None if success is None else outcome(success)
        await self.client.close(grant.group_id, DropReason(DropKind.FILTERED, "all alike"), outcome=result)
        self.curriculum.observe(grant.group_id, grant.position, result)


async def opened(client: LedgerClient, owner: OwnerId, curriculum: Curriculum, count: int) -> list[Draw]:
    proposed = curriculum.propose(count)
    reply = await client.open(owner, proposed, limit=count)
    assert reply.taken == len(reply.grants) == count
    curriculum.taken(reply.taken)
    return list(proposed)
