"""Records for tests of stores."""

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.task import TaskId
from rollbook.ledger.records import (
    GroupRecord,
    Origin,
)
from rollbook.ledger.store import Store, Transaction
from tests.parts.ledger.groups import RUN

OTHER = RunId("run-2")


def group(name: str, sequence: int, state: GroupState = GroupState.DISPATCHED, **fields: object) -> GroupRecord:
    record = GroupRecord(
        run_id=RUN,
        group_id=GroupId(name),
        task_id=TaskId("task"),
        draw=0,
        position=sequence,
        origin=Origin.DRAWN,
        state=state,
        sequence=sequence,
        opened_at=1.5,
    )
    return record.changed(**fields)


def ids(groups: list[GroupRecord]) -> list[str]:
    return [record.group_id for record in groups]


async def put(store: Store, *groups: GroupRecord) -> None:
    def work(tx: Transaction) -> None:
        for record in groups:
            tx.groups.put(record)

    await store.write(work)
