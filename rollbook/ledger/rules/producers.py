"""Producers outside the gate: registering one, and what part of each batch is theirs."""

import math

from rollbook.contracts.errors import RunError
from rollbook.ledger.records import ProducerRecord
from rollbook.ledger.rules.book import RunBook

MOST_PRODUCERS = 1_000
"""Deciding a batch looks at each of them."""
LONGEST_NAME = 128


def register_producer(book: RunBook, name: str, *, weight: float, min_share: float) -> ProducerRecord:
    """Register a producer, or change its weight and share. What it was owed stays."""
    if not 0 < len(name) <= LONGEST_NAME:
        raise RunError(f"run {book.run_id}: a producer's name has 1 to {LONGEST_NAME} characters, this one {len(name)}")
    if not (math.isfinite(weight) and weight > 0):
        raise RunError(f"run {book.run_id}: producer {name!r} has weight {weight}; it must be above 0")
    if not 0 <= min_share <= 1:
        raise RunError(f"run {book.run_id}: producer {name!r} has minimum share {min_share}; it lies between 0 and 1")
    producers = {known.name: known for known in book.tx.producers(book.run_id)}
    others = sum(known.min_share for known in producers.values() if known.name != name)
    # The hair: three thirds are one, whatever binary fractions make of it.
    if others + min_share > 1 + 1e-9:
        raise RunError(
            f"run {book.run_id}: producer {name!r} asks for a minimum share of {min_share:g}, the others have {others:g}; "
            "together they cannot have more than 1"
        )
    known = producers.get(name)
    if known is None and len(producers) >= MOST_PRODUCERS:
        raise RunError(f"run {book.run_id}: {MOST_PRODUCERS} producers are registered; no more are taken")
    if known is None:
        record = ProducerRecord(
            run_id=book.run_id, name=name, weight=weight, min_share=min_share, registered_at=book.now
        )
    else:
        record = known.changed(weight=weight, min_share=min_share)
    if record != known:
        book.tx.put_producer(record)
    return record


def find_producer(book: RunBook, name: str) -> ProducerRecord:
    for known in book.tx.producers(book.run_id):
        if known.name == name:
            return known
    raise RunError(
        f"run {book.run_id}: producer {name!r} is not registered; register it, or send its groups without a name"
    )
