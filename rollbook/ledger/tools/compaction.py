"""Making a ledger smaller: let payloads go that nobody needs to resume, then give the room back to the disk.

What is known of a group (its life, its outcome, the batch it was in) stays for good; only tokens go.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.config import Durability
from rollbook.ledger.rules.book import find_run, opened_book
from rollbook.ledger.rules.retention import let_payloads_go
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.stores.registry import open_store, reclaim


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    payloads_gone: int
    payload_bytes_gone: int
    bytes_before: int
    """Of the file, or of the ledger's tables and indexes."""
    bytes_after: int


async def compact(
    url: str,
    *,
    now: float,
    run_id: RunId | None = None,
    up_to_step: int | None = None,
    durability: Durability = Durability.POWER_LOSS,
) -> CompactReport:
    """Let go the payloads of `run_id`'s batches up to `up_to_step`, and shrink the store.

    Without a step only what was dropped goes, and what `keep_payloads = false` has let go already gives its room back. The run
    can be resumed from checkpoints of `up_to_step` and later only; a step beyond the last durable one is refused.
    """
    num_payloads = num_bytes = 0
    async with open_store(url, durability=durability) as store:
        for run in [run_id] if run_id is not None else await store.read(lambda tx: tx.runs()):
            if up_to_step is not None and run_id is None:
                raise RunError(f"up to step {up_to_step} of which run? Name one")
            gone = await _let_go(store, run, up_to_step, now)
            num_payloads, num_bytes = num_payloads + gone[0], num_bytes + gone[1]
    before, after = reclaim(url)
    return CompactReport(
        payloads_gone=num_payloads, payload_bytes_gone=num_bytes, bytes_before=before, bytes_after=after
    )


async def _let_go(store: Store, run_id: RunId, up_to_step: int | None, now: float) -> tuple[int, int]:
    """Step by step, so that no transaction grows with the length of the run."""
    run = await store.read(lambda tx: find_run(tx, run_id))
    last = run.durable_step if up_to_step is None else up_to_step
    if last > run.durable_step:
        raise RunError(
            f"run {run_id}: the last durable checkpoint is of step {run.durable_step}, so payloads up to {last} are still needed"
        )
    num_payloads = num_bytes = 0
    for step in range(last + 1):
        some = await store.write(_letting_go(run_id, step, dropped_only=up_to_step is None, now=now))
        num_payloads, num_bytes = num_payloads + some[0], num_bytes + some[1]
    return num_payloads, num_bytes


def _letting_go(
    run_id: RunId, step: int, *, dropped_only: bool, now: float
) -> Callable[[Transaction], tuple[int, int]]:
    def work(tx: Transaction) -> tuple[int, int]:
        with opened_book(tx, run_id, now) as book:
            return let_payloads_go(book, step, dropped_only=dropped_only)

    return work
