"""Several groups in one request: stored in one transaction, each with its own result. The client bundles concurrent submissions."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollbook.contracts.admission import Receipt
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, group_of, outcome_of, settings
from tests.parts.ledger.http import Caller, Response, group_body
from tests.parts.ledger.service import serving

LOG = EventLog("test", echo=sys.stdout)
SMALL = LedgerConfig(max_queued_groups=4, max_body_mb=0.5, max_receiving_mb=1)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, Ledger]]:
    async with serving(tmp_path, config=SMALL) as (url, ledger):
        await ledger.create_run(RUN, settings(per_step=2))
        yield url, ledger


async def send(url: str, groups: list[dict[str, Any]]) -> Response:
    async with aiohttp.ClientSession() as session:
        return await Caller(session, url).call("POST", "/submit", {"groups": groups})


async def test_each_group_has_its_own_result_and_a_rejected_one_does_not_affect_the_others(
    served: tuple[str, Ledger],
) -> None:
    url, ledger = served
    groups = [
        group_body("a"),
        group_body("b", digest="0" * 32),
        group_body("c", outcome=msgspec.to_builtins(replace(outcome_of(group_of("c", (-1,))), reward_mean=7.0))),
        group_body("a"),
        group_body("d", payload=b"no frame"),
        group_body("e", producer="nobody"),
        group_body("g"),
    ]
    results = (await send(url, groups)).json["results"]
    assert [result["receipt"] for result in results] == ["stored", None, None, "already_stored", None, None, "stored"]
    errors = {at: result["error"] for at, result in enumerate(results) if result["error"] is not None}
    assert {at: error["status"] for at, error in errors.items()} == dict.fromkeys((1, 2, 4, 5), 422)
    assert "damaged" in errors[1]["message"]
    assert "the mean reward is 0.5, not 7.0" in errors[2]["message"]
    assert (await ledger.status(RUN)).by_state[GroupState.QUEUED] == 2
    assert (await ledger.read(lambda tx: audit_run(tx, RUN))).violations == ()


async def test_a_full_queue_rejects_the_rest_with_a_retry_time(served: tuple[str, Ledger]) -> None:
    url, ledger = served
    results = (await send(url, [group_body(name) for name in "abcdef"])).json["results"]
    assert [result["receipt"] for result in results] == ["stored"] * 4 + [None] * 2
    assert [(r["error"]["status"], r["error"]["retry_after_s"]) for r in results[4:]] == [(429, 1.0)] * 2
    assert (await ledger.status(RUN)).by_state[GroupState.QUEUED] == 4


async def test_a_message_that_cannot_be_decoded_is_rejected_as_a_whole(served: tuple[str, Ledger]) -> None:
    url, ledger = served
    assert (await send(url, [group_body("a"), group_body("b", attempt=-1)])).status == 422
    assert (await send(url, [group_body("a"), group_body("b", drop={"kind": "no such reason"})])).status == 422
    assert (await send(url, [group_body("a")] * (wire.MAX_GROUPS + 1))).status == 422
    assert (await send(url, [group_body("a", payload=b"x" * 600_000)])).status == 413
    assert (await send(url.replace("127.0.0.1", "localhost"), [])).status == 200
    assert (await ledger.status(RUN)).opened == 0


async def test_groups_submitted_at_the_same_time_share_requests(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (url, _),
        open_ledger_client(url, RUN, request_s=30, log=LOG) as client,
        aiohttp.ClientSession() as session,
    ):
        await client.create_run(settings(per_step=40))
        groups = [group_of(f"t{number}", (-1,)) for number in range(40)]

        async def play(group: Any) -> Receipt:
            return (await client.submit(encode_group(group))).receipt

        receipts = await asyncio.gather(*map(play, groups), *map(play, groups))
        assert receipts == [Receipt.STORED] * 40 + [Receipt.ALREADY_STORED] * 40
        metrics = (await Caller(session, url).call("GET", "//metrics")).body.decode()
        requests = [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("rollbook_ledger_requests_total{") and 'route="submit' in line
        ]
        assert sum(requests) <= 4
        await client.take_role(restored_step=0)
        await client.confirm(await client.register(0, "w0"))
        batch = await client.batch(1, wait_s=10)
        assert isinstance(batch, TrainingBatch)
        assert {group.id for group in batch.groups} == {group.id for group in groups}


async def test_each_caller_receives_the_result_of_its_own_group(served: tuple[str, Ledger]) -> None:
    url, _ = served
    async with open_ledger_client(url, RUN, request_s=1.5, log=LOG) as client:

        async def play(name: str, *publications: int, **more: Any) -> Any:
            group = group_of(name, publications or (-1,))
            try:
                return (await client.submit(encode_group(group, **more))).receipt
            except (RunError, TransientError) as error:
                return error

        good, lost, dropped, foreign, again = await asyncio.gather(
            play("good"),
            play("lost", 77),
            play("dropped", drop=DropReason(DropKind.FILTERED, "all alike")),
            play("foreign", producer="nobody"),
            play("good"),
        )
        assert (good, dropped, again) == (Receipt.STORED, Receipt.STORED, Receipt.ALREADY_STORED)
        assert isinstance(lost, RunError)
        assert "publication 77" in str(lost)
        assert isinstance(foreign, RunError)
        # One group is queued and three more fit; the others are retried until `request_s` is over.
        later = await asyncio.gather(*(play(f"later{number}") for number in range(5)))
        assert sorted(str(type(found).__name__) for found in later) == ["Receipt"] * 3 + ["TransientError"] * 2


async def test_the_groups_of_a_bundle_that_is_too_large_are_sent_one_by_one(served: tuple[str, Ledger]) -> None:
    url, ledger = served
    async with open_ledger_client(url, RUN, request_s=30, log=LOG) as client:
        groups = [group_of(f"t{number}", (-1,) * 15_000) for number in range(4)]
        await asyncio.gather(*(client.submit(encode_group(group)) for group in groups))
        assert (await ledger.status(RUN)).by_state[GroupState.QUEUED] == 4


async def test_a_cancelled_caller_does_not_affect_the_others(served: tuple[str, Ledger]) -> None:
    url, ledger = served
    async with open_ledger_client(url, RUN, request_s=30, log=LOG) as client:
        tasks = [asyncio.create_task(submit(client, name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert await tasks[0] is Receipt.STORED
        assert await tasks[2] is Receipt.STORED
        assert (await ledger.status(RUN)).by_state[GroupState.QUEUED] in (2, 3)
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]


async def submit(client: LedgerClient, name: str) -> Receipt:
    group = group_of(name, (-1,))
    return (await client.submit(encode_group(group))).receipt
