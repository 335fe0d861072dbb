"""The ledger's state machine on PostgreSQL, with two replicas that are replaced and a database that crashes."""

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from rollbook.ledger.rules import gate
from tests.parts.ledger.postgres import shared_server
from tests.parts.ledger.run_driver import RunDriver, blocking_postgres
from tests.properties.test_ledger_machine import QUICK, LedgerMachine

MOST_CRASHES = 2
"""In one example: each takes a third of a second."""


class PostgresLedgerMachine(LedgerMachine):
    def make_driver(self) -> RunDriver:
        self.num_crashes = 0
        self.url = shared_server().fresh_url()
        self.stores = [blocking_postgres(self.url), blocking_postgres(self.url)]
        return RunDriver(self.stores[0])

    @rule()
    def the_other_replica_serves(self) -> None:
        """Both stay open, and each has rows from earlier commits in its memory."""
        self.stores.reverse()
        self.driver.store = self.stores[0]

    @rule()
    def a_replica_takes_the_place_of_another(self) -> None:
        self.stores[0].close()
        self.stores[0] = self.driver.store = blocking_postgres(self.url)
        self.driver.now += 5
        self.driver.rule(gate.extend_leases)

    @precondition(lambda self: self.num_crashes < MOST_CRASHES)
    @rule()
    def the_database_crashes(self) -> None:
        self.num_crashes += 1
        shared_server().kill()
        shared_server().start()

    def teardown(self) -> None:
        super().teardown()
        for store in getattr(self, "stores", []):
            store.close()


def test_the_rules_hold_on_a_database_that_crashes() -> None:
    shared_server()
    run_state_machine_as_test(
        PostgresLedgerMachine, settings=settings(QUICK, max_examples=4, stateful_step_count=25, derandomize=True)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rules_hold_on_a_database_that_crashes_in_many_more_orders() -> None:
    shared_server()
    run_state_machine_as_test(PostgresLedgerMachine, settings=settings(QUICK, max_examples=60, stateful_step_count=40))
