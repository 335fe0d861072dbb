"""Kill the ledger again and again under load, and count what is lost.

    python -m tests.faults.ledger_crashes --kills 200 --store sqlite

Producers, a dispatcher and a trainer, all native clients, work against the service while it is killed at seeded moments. With
PostgreSQL two replicas serve them, and the database itself is killed and restarted, too. After each kill, before anything is
started again, the record is audited and every group that was ever acknowledged is looked for. At the end everything is trained to
the last group, and the trainer's own notes are held against the ledger's.
"""

import argparse
import asyncio
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rollbook.contracts.admission import OwnerId, Receipt
from rollbook.contracts.batch import BatchManifest, EndOfRun, TrainingBatch
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import Durability
from rollbook.ledger.stores.registry import open_reader, sqlite_url
from rollbook.ledger.tools.audit import audit
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, group_of, settings
from tests.parts.ledger.postgres import PostgresServer, make_server
from tests.parts.ledger.replica import Replica

PER_STEP = 4
NUM_PRODUCERS = 4
MOST_QUEUED = 60
REQUEST_S = 600.0
"""A call may be unlucky many times in a row: the service lives for a second, and clients back off."""
KEPT = frozenset({GroupState.QUEUED, GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE})
DATABASE_SHARE = 0.4
"""Of the kills with PostgreSQL, those that hit the database and not a replica."""


@dataclass
class Counts:
    store: str
    seed: int
    kills: int = 0
    database_restarts: int = 0
    audits: int = 0
    acknowledged: int = 0
    trained: int = 0
    dropped_stale: int = 0
    steps: int = 0
    trainer_takeovers: int = 0
    lost: int = 0
    trained_twice: int = 0
    batches_changed: int = 0
    audit_violations: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    def find(self, what: str, sentence: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.findings.append(sentence)


class Crash:
    """One experiment. Everything random comes from its seed, apart from the operating system's scheduling."""

    def __init__(
        self,
        store_url: str,
        counts: Counts,
        database: PostgresServer | None,
        durability: Durability = Durability.POWER_LOSS,
    ) -> None:
        self.url = store_url
        self.counts = counts
        self.database = database
        self.rng = random.Random(counts.seed)
        self.acknowledged: set[GroupId] = set()
        self.manifests: dict[int, BatchManifest] = {}
        self.acknowledged_steps: set[int] = set()
        self.is_loading = True
        self.replicas = [Replica(store_url, durability=durability) for _ in range(1 if database is None else 2)]
        self.log = EventLog("crash", echo=io.StringIO())

    async def run(self, kills: int) -> None:
        started = time.monotonic()
        for replica in self.replicas:
            replica.start()
        try:
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(
                        open_ledger_client(self._any_url(at), RUN, request_s=REQUEST_S, log=self.log)
                    )
                    for at in range(NUM_PRODUCERS + 2)
                ]
                await clients[0].create_run(
                    settings(
                        per_step=PER_STEP, in_flight=8, staleness_bound=4, policy=BatchPolicy.DROP, keep_payloads=False
                    )
                )
                async with asyncio.TaskGroup() as group:
                    trainer = group.create_task(self._train(clients[0]))
                    load = [group.create_task(self._produce(at, client)) for at, client in enumerate(clients[2:])]
                    load.append(group.create_task(self._dispatch(clients[1])))
                    await self._kill(kills)
                    self.is_loading = False
                    await asyncio.gather(*load)
                    await clients[1].exhausted()
                    await trainer
        finally:
            for replica in self.replicas:
                replica.close()
        self._check()
        self._check_the_end()
        self.counts.seconds = round(time.monotonic() - started, 1)

    def _any_url(self, at: int) -> str:
        return self.replicas[at % len(self.replicas)].url

    # ------------------------------------------------------------------ load

    async def _produce(self, lane: int, client: LedgerClient) -> None:
        number = 0
        while self.is_loading:
            group = group_of(f"lane{lane}-{number}", (-1,))
            number += 1
            self._noted(group.id, (await client.submit(encode_group(group))).receipt)
            # No faster than it is trained, or the queue, and with it every audit, grows with the number of kills.
            while self._is_ahead():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _is_ahead(self) -> bool:
        return self.is_loading and len(self.acknowledged) > PER_STEP * len(self.manifests) + MOST_QUEUED

    async def _dispatch(self, client: LedgerClient) -> None:
        owner: OwnerId = await client.join("rollout")
        at = 0
        while self.is_loading:
            reply = await client.open(owner, draws(at, 4), limit=4, wait_s=0.05)
            at += reply.taken
            for grant in reply.grants:
                group = group_of(grant.task_id, (grant.admission_publication,))
                stored = await client.submit(encode_group(group, attempt=grant.attempt))
                self._noted(group.id, stored.receipt)

    def _noted(self, group_id: GroupId, receipt: Receipt) -> None:
        if receipt is not Receipt.ALREADY_SETTLED:
            self.acknowledged.add(group_id)

    async def _train(self, client: LedgerClient) -> None:
        """Train to the end; now and then die, come back from the last checkpoint and replay."""
        step = checkpoint = 0
        await client.take_role(restored_step=0)
        await client.confirm(await client.register(0, "w0"))
        while True:
            batch = await client.batch(step + 1, wait_s=0.2)
            if isinstance(batch, EndOfRun):
                await client.finish(batch)
                return
            if batch is None:
                continue
            step += 1
            self._trained(batch)
            await client.acknowledge(step, f"w{step}")
            self.acknowledged_steps.add(step)
            if step == max(self.acknowledged_steps):
                await client.confirm(await client.register(step, f"w{step}"))
            if step % 5 == 0:
                await client.checkpointed(step, oldest_kept=step)
                checkpoint = step
            if self.is_loading and self.rng.random() < 0.02:
                self.counts.trainer_takeovers += 1
                await client.take_role(restored_step=checkpoint)
                step = checkpoint
                if step == max(self.acknowledged_steps, default=0):
                    await client.confirm(await client.register(step, f"w{step}"))

    def _trained(self, batch: TrainingBatch) -> None:
        known = self.manifests.setdefault(batch.step, batch.manifest)
        if known != batch.manifest:
            self.counts.find("batches_changed", f"batch {batch.step} changed")
        got, expected = [group.id for group in batch.groups], [entry.group_id for entry in batch.manifest.entries]
        if got != expected:
            self.counts.find("batches_changed", f"batch {batch.step} came with {got}, decided were {expected}")

    # ------------------------------------------------------------------ faults

    async def _kill(self, kills: int) -> None:
        for _ in range(kills):
            enough = len(self.acknowledged) + self.rng.randint(5, 40)
            while len(self.acknowledged) < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.rng.random() * 0.03)
            # In this thread: the database dies with the thread that started it.
            self._strike()
            self.counts.kills += 1

    def _strike(self) -> None:
        if self.database is not None and self.rng.random() < DATABASE_SHARE:
            (self.database.kill if self.rng.random() < 0.7 else self.database.stop)()
            self.database.start()
            self.counts.database_restarts += 1
            self._check()
            return
        replica = self.rng.choice(self.replicas)
        replica.kill()
        self._check()
        replica.start()

    # ------------------------------------------------------------------ truth

    def _check(self) -> None:
        """The record adds up, and every acknowledged group is in it. Acknowledged is what the client had read by now."""
        must_be_there = set(self.acknowledged)
        with open_reader(self.url) as reader:
            report = audit(reader, RUN)
            states = reader.read_now(lambda tx: {g.group_id: (g.state, g.drop_reason) for g in tx.groups.each(RUN)})
        self.counts.audits += 1
        for sentence in report.violations:
            self.counts.find("audit_violations", sentence)
        for group_id in sorted(must_be_there):
            state, reason = states.get(group_id, (None, None))
            if state not in KEPT and not (state is GroupState.DROPPED and (reason or "").startswith("stale")):
                self.counts.find("lost", f"{group_id} was acknowledged and is {state} ({reason})")

    def _check_the_end(self) -> None:
        """What the trainer trained is what was acknowledged, each group in one batch."""
        steps_of = Counter(entry.group_id for manifest in self.manifests.values() for entry in manifest.entries)
        for group_id, number in steps_of.items():
            if number > 1:
                self.counts.find("trained_twice", f"{group_id} is in {number} batches")
        with open_reader(self.url) as reader:
            stale = reader.read_now(
                lambda tx: {g.group_id for g in tx.groups.each(RUN) if g.state is GroupState.DROPPED}
            )
        for group_id in sorted(self.acknowledged - set(steps_of) - stale):
            self.counts.find("lost", f"{group_id} was acknowledged and never trained")
        self.counts.acknowledged = len(self.acknowledged)
        self.counts.trained = len(steps_of)
        self.counts.dropped_stale = len(self.acknowledged & stale)
        self.counts.steps = len(self.acknowledged_steps)


def crash_sqlite(directory: Path, *, kills: int, seed: int, durability: Durability = Durability.POWER_LOSS) -> Counts:
    counts = Counts(store="sqlite", seed=seed)
    asyncio.run(Crash(sqlite_url(directory), counts, None, durability).run(kills))
    return counts


def crash_postgresql(server: PostgresServer, *, kills: int, seed: int) -> Counts:
    counts = Counts(store="postgresql", seed=seed)
    asyncio.run(Crash(server.fresh_url(), counts, server).run(kills))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", type=Durability, default=Durability.POWER_LOSS, help="of SQLite")
    asked = parser.parse_args()
    if asked.store == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            counts = crash_sqlite(Path(directory), kills=asked.kills, seed=asked.seed, durability=asked.durability)
    else:
        server = make_server()
        counts = crash_postgresql(server, kills=asked.kills, seed=asked.seed)
        server.kill()
    sys.stdout.write(json.dumps(asdict(counts)) + "\n")
    return 1 if counts.findings else 0


if __name__ == "__main__":
    sys.exit(main())
