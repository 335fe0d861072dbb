"""A submitted group on the wire: only numbers that every store can keep are accepted."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from benchmarks.ledger.bodies import native_group, submission
from rollbook.ledger.http import verbs

DECODER = msgspec.msgpack.Decoder(verbs.Submit)


def body_of(**sample_changes: Any) -> bytes:
    group = native_group(0)
    outcome = group.outcome
    first, *others = outcome.samples
    changed = replace(outcome, samples=(first._replace(**sample_changes), *others))
    return msgspec.msgpack.encode(submission(group)).replace(
        msgspec.msgpack.encode(outcome), msgspec.msgpack.encode(changed)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": float("nan")}, "nan is not a finite number"),
        ({"seconds": float("inf")}, "inf is not a finite number"),
        ({"started_at": float("-inf")}, "-inf is not a finite number"),
        ({"tokens": 2**53}, "has more than 53 bits"),
        ({"turns": -(2**53)}, "has more than 53 bits"),
    ],
)
def test_an_outcome_with_a_number_that_cannot_be_stored_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        DECODER.decode(body_of(**changes))


@pytest.mark.parametrize("changes", [{"reward": 1e300}, {"tokens": 2**53 - 1}, {"seconds": None}, {"solved": True}])
def test_an_outcome_with_a_large_or_missing_number_is_accepted(changes: dict[str, Any]) -> None:
    sample = DECODER.decode(body_of(**changes)).groups[0].outcome.samples[0]
    assert {name: getattr(sample, name) for name in changes} == changes
