"""How long tokens are kept: at least until the oldest checkpoint that is kept covers them, then as an operator says."""

from rollbook.ledger.rules.book import RunBook


def let_payloads_go(book: RunBook, up_to_step: int, *, dropped_only: bool) -> tuple[int, int]:
    """Delete the payloads that no step after `up_to_step` needs. Returns how many, and their bytes."""
    gone = book.tx.releasable(book.run_id, up_to_step, dropped_only=dropped_only)
    for group in gone:
        book.tx.delete_payload(book.run_id, group.group_id)
        book.tx.put_group(group.changed(has_payload=False))
    if not dropped_only:
        book.change(payload_floor=max(book.run.payload_floor, up_to_step))
    return len(gone), sum(group.payload_bytes for group in gone)
