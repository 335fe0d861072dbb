"""What came of the draws of a run, in order of admission: what a curriculum is rebuilt from."""

import msgspec

from rollbook.contracts.admission import PastDraw, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupOutcome
from rollbook.ledger.records import GroupRecord
from rollbook.ledger.rules.book import find_run
from rollbook.ledger.store import Transaction

MOST_IN_A_PAGE = 10_000
"""Some megabytes: whoever wants more asks again."""


def outcomes(tx: Transaction, run_id: RunId, *, after: int, limit: int) -> list[PastDraw]:
    """Draws whose sequence is above `after`, lowest first. -1 begins; an empty answer ends."""
    if limit < 1:
        raise RunError(f"run {run_id}: a page of {limit} outcomes was asked for; ask for at least 1")
    find_run(tx, run_id)
    return [_past_draw(group) for group in tx.groups_after(run_id, after, min(limit, MOST_IN_A_PAGE))]


def _past_draw(group: GroupRecord) -> PastDraw:
    return PastDraw(
        group_id=group.group_id,
        task_id=group.task_id,
        number=group.draw,
        position=group.position,
        sequence=group.sequence,
        state=group.state,
        outcome=None if group.outcome is None else msgspec.json.decode(group.outcome, type=GroupOutcome),
    )
