"""What a PostgreSQL replica sends to its database: few statements, and none for rows that it knows to be current."""

import re
from collections import Counter
from contextlib import closing

import pytest

from rollbook.contracts.admission import OwnerId
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupId
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.postgres.writer import PostgresWriter
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.postgres import shared_server
from tests.parts.ledger.records import group, put
from tests.parts.ledger.run_driver import BlockingStore, RunDriver

GROUPS = 4
STATEMENT = re.compile(r"\[(\d+)\] LOG:  (?:statement|execute [^:]+): (.{,40})")


class CountedReplica:
    """A replica whose statements are in the log of the server."""

    def __init__(self) -> None:
        self._log = shared_server().directory / "log"
        self.writer = PostgresWriter(shared_server().fresh_url() + "%20-clog_statement%3Dall")
        self.writer.prepare()
        self.driver = RunDriver(BlockingStore(self.writer))
        self._end = 0
        self.statements()

    def statements(self) -> Counter[str]:
        """Those since the last call, by their first words."""
        text = self._log.read_bytes()[self._end :]
        self._end += len(text)
        found = STATEMENT.findall(text.decode(errors="replace"))
        return Counter(words for pid, words in found if int(pid) == self.writer.backend_pid)


def train_a_step(driver: RunDriver, owner: OwnerId, step: int) -> None:
    """One request for each group, as if nothing arrived at the same time."""
    first = GROUPS * (step - 1)
    for _ in range(2):
        driver.open(owner, draws(first, GROUPS))
        assert driver.decide(step).manifest is None
    for number in range(GROUPS):
        driver.submit(f"task{first + number}", (step - 1,), samples=1)
    assert driver.decide(step).is_new
    driver.acknowledge(step)
    driver.publish(step)


def test_a_step_of_four_groups_takes_few_statements() -> None:
    replica = CountedReplica()
    with closing(replica.writer):
        driver = replica.driver.create(
            settings(per_step=GROUPS, in_flight=64, staleness_bound=2, policy=BatchPolicy.TRIM)
        )
        driver.take_role()
        driver.publish(0)
        owner = driver.join()
        for step in range(1, 11):
            train_a_step(driver, owner, step)
        replica.statements()
        for step in range(11, 21):
            train_a_step(driver, owner, step)
        counted = replica.statements()
    per_step = sum(counted.values()) / 10
    # 12 transactions, of which 9 write. It was 192 when each row was read and written with its own statement.
    assert counted["COMMIT"] == 120
    assert per_step <= 85, counted.most_common()


def test_a_row_that_is_known_is_not_read_again() -> None:
    replica = CountedReplica()
    with closing(replica.writer):
        driver = replica.driver.create(settings())
        driver.status()
        replica.statements()
        for _ in range(5):
            driver.rule(lambda run_tx: run_tx.tx.groups.get(RUN, GroupId("none")))
        counted = replica.statements()
    assert sum(counted.values()) == 5 * len(("BEGIN with its locks", "COMMIT")) + 1


async def test_replicas_see_the_changes_of_each_other() -> None:
    url = shared_server().fresh_url()
    async with open_postgres_store(url) as one, open_postgres_store(url) as other:

        def count(tx: Transaction) -> int:
            known = tx.positions.get(RUN, 3) or 0
            tx.positions.put(RUN, 3, unsettled=known + 1)
            return known

        for number in range(10):
            assert await (one, other)[number % 2].write(count, run_id=RUN) == number
        # A row that one of them knows not to exist.
        for store in (one, other):
            assert await store.write(lambda tx: tx.groups.get(RUN, GroupId("new")), run_id=RUN) is None
        await put(other, group("new", 0))
        assert await one.write(lambda tx: tx.groups.get(RUN, GroupId("new")), run_id=RUN) == group("new", 0)


async def test_a_row_that_the_database_refuses_is_not_known_afterwards() -> None:
    async with open_postgres_store(shared_server().fresh_url()) as store:
        with pytest.raises(RunError, match="cannot be stored"):
            await put(store, group("a", 2**63))
        assert await store.write(lambda tx: tx.groups.get(RUN, GroupId("a"))) is None
