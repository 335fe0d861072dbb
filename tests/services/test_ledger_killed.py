"""kill -9 of a ledger process during submissions: no acknowledged group is lost, and clients continue."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.contracts.admission import Receipt
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.client.client import open_ledger_client
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, group_of, settings
from tests.parts.ledger.service import LedgerChild

LOG = EventLog("test", echo=sys.stdout)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[LedgerChild]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = LedgerChild(tmp_path, port)
    child.start()
    yield child
    child.kill()


async def test_no_acknowledged_group_is_lost_when_the_ledger_is_killed(child: LedgerChild) -> None:
    answered: list[str] = []
    is_busy = asyncio.Event()

    async with open_ledger_client(child.url, RUN, request_s=3.0, log=LOG) as client:
        await client.create_run(settings(per_step=2))

        async def produce(lane: int) -> None:
            for number in range(1_000):
                group = group_of(f"lane{lane}-{number}", (-1,))
                try:
                    assert (await client.submit(encode_group(group))).receipt is Receipt.STORED
                except TransientError:
                    return
                answered.append(group.id)
                if len(answered) >= 40:
                    is_busy.set()

        async def kill() -> None:
            await is_busy.wait()
            await asyncio.to_thread(child.kill)

        await asyncio.gather(kill(), *(produce(lane) for lane in range(8)))

    with open_readonly(child.directory) as file:
        assert audit(file, RUN).violations == ()
        stored = file.read_now(lambda tx: {g.group_id for g in tx.groups.each(RUN)})
    assert len(answered) >= 40
    assert set(map(GroupId, answered)) <= stored


async def test_clients_continue_after_the_ledger_is_killed_and_restarted(child: LedgerChild) -> None:
    async with (
        open_ledger_client(child.url, RUN, request_s=60, log=LOG) as dispatcher,
        open_ledger_client(child.url, RUN, request_s=60, log=LOG) as trainer,
    ):
        await trainer.create_run(settings(per_step=4, in_flight=8, staleness_bound=3))
        await trainer.take_role(restored_step=0)
        await trainer.confirm(await trainer.register(0, "w0"))
        owner = await dispatcher.join("rollout")

        async def play() -> None:
            at = 0
            while at < 16:
                reply = await dispatcher.open(owner, draws(at, 16 - at), limit=4, wait_s=5)
                at += reply.taken
                for grant in reply.grants:
                    group = group_of(grant.task_id, (grant.admission_publication,))
                    await dispatcher.submit(encode_group(group, attempt=grant.attempt))

        async def train() -> list[str]:
            digests = []
            for step in (1, 2, 3, 4):
                batch = None
                while batch is None:
                    batch = await trainer.batch(step, wait_s=5)
                assert isinstance(batch, TrainingBatch)
                digests.append(batch.manifest.digest)
                await trainer.acknowledge(step, f"w{step}")
                await trainer.confirm(await trainer.register(step, f"w{step}"))
            return digests

        async def kill_twice() -> None:
            for _ in range(2):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(child.kill)
                await asyncio.to_thread(child.start)

        _, digests, _ = await asyncio.gather(play(), train(), kill_twice())
        again = [await trainer.batch(step, wait_s=0) for step in (1, 2, 3, 4)]
        assert [b.manifest.digest for b in again if isinstance(b, TrainingBatch)] == digests
        status = await dispatcher.status()
        assert (status.opened, status.by_state["trained"]) == (16, 16)
    with open_readonly(child.directory) as file:
        assert audit(file, RUN).violations == ()
