"""A transaction on a SQL database: all parts on one session."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.store import ChangedRows, Payloads
from rollbook.ledger.stores.sql.groups import SqlGroups, SqlHistory, SqlPayloads
from rollbook.ledger.stores.sql.runs import SqlActions, SqlMembers, SqlOwners, SqlPositions, SqlProducers, SqlRuns
from rollbook.ledger.stores.sql.schema import SqlSideTables, Translate
from rollbook.ledger.stores.sql.tables import BATCHES, CHECKED, ENTRIES, GROUPS, MOVES, PUBLICATIONS, STEPS
from rollbook.ledger.stores.sql.training import SqlBatches, SqlPublications, SqlSteps
from rollbook.ledger.stores.sql.write_buffer import SqlSession


class SqlTransaction:
    """Satisfies `store.Transaction`. A writer encloses each operation in `begin` and `end` or `fail`, then calls `flush`."""

    def __init__(
        self,
        session: SqlSession,
        where: str,
        *,
        payloads: Payloads | None = None,
        translate: Translate = str,
        check_file: Callable[[bool], Iterable[str]] = lambda _: (),
    ) -> None:
        """`check_file` reports lost commits and, if its argument is true, all damage that the database can find itself."""
        self.session = session
        self._check_file = check_file
        self.runs = SqlRuns(session)
        self.owners = SqlOwners(session)
        self.members = SqlMembers(session)
        self.actions = SqlActions(session)
        self.producers = SqlProducers(session)
        self.groups = SqlGroups(session)
        self.payloads: Payloads = SqlPayloads(session) if payloads is None else payloads
        self.positions = SqlPositions(session)
        self.history = SqlHistory(session)
        self.batches = SqlBatches(session)
        self.steps = SqlSteps(session)
        self.publications = SqlPublications(session)
        self.side_tables = SqlSideTables(session, where, translate)
        self.must_sync = False
        self.announced: set[RunId] = set()
        self.payloads_to_sync: list[tuple[RunId, Sequence[GroupId]]] = []
        self.syncs_all_payloads = False

    def begin(self) -> None:
        self.session.begin()
        self.announced = set()
        self.must_sync = False

    def end(self) -> None:
        self.session.end()

    def fail(self) -> None:
        self.session.fail()

    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        self.must_sync = True
        if run_id is None:
            self.syncs_all_payloads = True
        else:
            self.payloads_to_sync.append((run_id, group_ids))

    def damage(self, run_id: RunId, only: ChangedRows | None = None) -> Iterator[str]:
        yield from self._check_file(only is None)
        if only is not None:
            yield from self._damage_of(run_id, only)
            return
        for table in CHECKED:
            # A row whose run is unknown may be one of this run.
            unknown = "WHERE run_id NOT IN (SELECT run_id FROM runs)"
            yield from table.damaged(self.session.stream(table.select_checked + unknown, ()))
            if table not in (GROUPS, MOVES):
                yield from table.damaged(self.session.stream(table.select_checked + "WHERE run_id = ?", (run_id,)))

    def _damage_of(self, run_id: RunId, only: ChangedRows) -> Iterator[str]:
        select = self.session.stream
        for table in CHECKED:
            if table in (GROUPS, MOVES):
                continue
            if table in (BATCHES, ENTRIES, STEPS):
                where = "WHERE run_id = ? AND step > ?"
                yield from table.damaged(select(table.select_checked + where, (run_id, only.after_step)))
            elif table is PUBLICATIONS:
                where = "WHERE run_id = ? AND id >= ?"
                yield from table.damaged(select(table.select_checked + where, (run_id, only.publication)))
            else:
                yield from table.damaged(select(table.select_checked + "WHERE run_id = ?", (run_id,)))

    def announce(self, run_id: RunId) -> None:
        self.announced.add(run_id)
