"""Compaction: deletes payloads that no resume needs, so that the store can then be shrunk.

A group's record, history, outcome and batch are kept forever; only its tokens are deleted.
"""

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.rules.groups import delete_payloads
from rollbook.ledger.rules.run_transaction import find_run, run_transaction
from rollbook.ledger.store import Store, Transaction

PAYLOADS_PER_TRANSACTION = 1_000
"""So that no transaction grows with the length of the run."""


async def compact(
    store: Store, *, now: float, run_id: RunId | None = None, up_to_step: int | None = None
) -> tuple[int, int]:
    """Delete the payloads of `run_id`'s batches up to `up_to_step`. Returns their number and their bytes.

    Without a step, only payloads of dropped groups are deleted, in all runs if no run is given. Afterwards the run can be resumed
    only from checkpoints of `up_to_step` and later; a step beyond the last durable one is refused.
    """
    if up_to_step is not None and run_id is None:
        raise RunError(f"a run is required to compact up to step {up_to_step}")
    num_payloads = num_bytes = 0
    for run in [run_id] if run_id is not None else await store.read(lambda tx: tx.runs.ids()):
        deleted = await _compact_run(store, run, up_to_step, now)
        num_payloads, num_bytes = num_payloads + deleted[0], num_bytes + deleted[1]
    return num_payloads, num_bytes


async def _compact_run(store: Store, run_id: RunId, up_to_step: int | None, now: float) -> tuple[int, int]:
    run = await store.read(lambda tx: find_run(tx, run_id))
    last = run.durable_step if up_to_step is None else up_to_step
    if last > run.durable_step:
        raise RunError(
            f"run {run_id}: the last durable checkpoint is of step {run.durable_step}, so payloads up to {last} are still needed"
        )

    def delete(tx: Transaction) -> tuple[int, int]:
        with run_transaction(tx, run_id, now) as run_tx:
            return delete_payloads(run_tx, last, dropped_only=up_to_step is None, limit=PAYLOADS_PER_TRANSACTION)

    num_payloads = num_bytes = 0
    while True:
        deleted = await store.write(delete, run_id=run_id)
        num_payloads, num_bytes = num_payloads + deleted[0], num_bytes + deleted[1]
        if deleted[0] < PAYLOADS_PER_TRANSACTION:
            return num_payloads, num_bytes
