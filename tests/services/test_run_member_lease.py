"""Processes that hold leases in a real ledger service: exclusive roles, lost leases, members that return."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.admission import MemberId, MemberReply, MemberRole
from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.service import Ledger
from rollbook.run.supervision.membership import member_lease
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.service import serving

LOG = EventLog("test", echo=sys.stdout)
LEASE_S = 1.0


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[tuple[LedgerClient, Ledger]]:
    async with serving(tmp_path) as (url, service), open_ledger_client(url, RUN, request_s=10, log=LOG) as client:
        await client.create_run(settings())
        yield client, service


def supervisor(client: LedgerClient, name: str, **options: object) -> AbstractAsyncContextManager[None]:
    return member_lease(client, name=name, role=MemberRole.SUPERVISOR, log=LOG, lease_s=LEASE_S, **options)  # type: ignore[arg-type]


async def ids(client: LedgerClient) -> list[MemberId]:
    return [member.id for member in await client.members()]


async def test_a_second_supervisor_is_refused_while_the_first_sends_heartbeats(
    ledger: tuple[LedgerClient, Ledger],
) -> None:
    client, _ = ledger
    async with supervisor(client, "first"):
        with pytest.raises(RunError, match="in use by another `rollbook train` on"):
            async with supervisor(client, "second"):
                pass
        assert [member.name for member in await client.members()] == ["first"]
    assert await ids(client) == []
    async with supervisor(client, "second"):
        assert [member.name for member in await client.members()] == ["second"]


async def test_a_supervisor_takes_the_run_once_the_lease_of_a_dead_one_has_ended(
    ledger: tuple[LedgerClient, Ledger],
) -> None:
    client, service = ledger
    dead = await service.join_member(
        RUN, name="dead", role=MemberRole.SUPERVISOR, node="gone", address="", lease_s=LEASE_S, nonce="n"
    )
    said: list[str] = []
    async with supervisor(client, "next", say=said.append):
        assert dead.member not in await ids(client)
        assert said == ["waiting for the lease of the supervisor on gone to end (at most 1 s)"]


async def test_a_supervisor_whose_lease_ended_is_told_and_does_not_join_again(
    ledger: tuple[LedgerClient, Ledger],
) -> None:
    client, service = ledger
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with supervisor(client, "first", on_lost=lost.put_nowait):
        await service.leave_member(RUN, (await ids(client))[0])
        assert "join again" in await asyncio.wait_for(lost.get(), 30)
        assert await ids(client) == []


async def test_a_member_whose_lease_ended_joins_again_even_if_the_first_attempt_fails(
    ledger: tuple[LedgerClient, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = ledger
    async with member_lease(client, name="p", role=MemberRole.POLICY, address="http://p", log=LOG, lease_s=LEASE_S):
        (first,) = await ids(client)
        join, attempts = client.join_member, list[str]()

        async def unreachable_once(**fields: Any) -> MemberReply:
            attempts.append(fields["name"])
            if len(attempts) == 1:
                raise TransientError("the ledger is unreachable")
            return await join(**fields)

        monkeypatch.setattr(client, "join_member", unreachable_once)
        await service.leave_member(RUN, first)
        async with asyncio.timeout(20):
            while not (found := await ids(client)):  # noqa: ASYNC110 - polled over HTTP
                await asyncio.sleep(0.02)
        assert found != [first]
        assert len(attempts) == 2


async def test_a_policy_server_whose_lease_ended_joins_again_as_a_new_member(
    ledger: tuple[LedgerClient, Ledger],
) -> None:
    client, service = ledger
    lease = member_lease(
        client, name="p", role=MemberRole.POLICY, address="http://p", log=LOG, report=lambda: (4, 2.0), lease_s=LEASE_S
    )
    async with lease:
        (first,) = await ids(client)
        await service.leave_member(RUN, first)
        while not (found := await client.members()) or found[0].publication is None:  # noqa: ASYNC110 - polled over HTTP
            await asyncio.sleep(0.02)
        (again,) = found
        assert again.id != first
        assert (again.address, again.publication, again.load) == ("http://p", 4, 2.0)
    assert await ids(client) == []
