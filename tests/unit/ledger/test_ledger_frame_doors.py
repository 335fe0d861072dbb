"""What is no group is refused before it is stored, and never costs memory."""

import msgspec
import numpy as np
import pytest

from rollbook.contracts.errors import RunError
from rollbook.contracts.group_codec import FORMAT, RUN_FIELDS, RowFrame, check_frame, encode_group
from rollbook.contracts.trajectory import TokenRow
from tests.parts.ledger.groups import big_group, group_of

GOOD = encode_group(group_of("a", (0, 3, -1))).payload


def changed(**fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(GOOD), **fields})


def with_row(row: list[bytes]) -> bytes:
    frame = msgspec.msgpack.decode(GOOD)
    frame["samples"][0]["sequences"][0] = row
    return msgspec.msgpack.encode(frame)


def runs(*triples: tuple[int, int, int]) -> bytes:
    return np.array(triples, dtype="<i4").tobytes()


def test_a_good_group_passes() -> None:
    check_frame(GOOD, group_id="a@0")
    check_frame(encode_group(big_group("b")).payload, group_id="b@0")


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"", "not a group"),
        (GOOD[:-3], "not a group"),
        (GOOD + b"\x00", "not a group"),
        (changed(format=FORMAT + 1), "supported is"),
        (changed(group_id="b@0"), "that of group b@0"),
        (changed(samples=[]), "no samples"),
        (with_row([b"", b"", b""]), "empty or of unequal length"),
        (with_row([bytes(8), bytes(4), runs((2, -1, 0))]), "empty or of unequal length"),
        (with_row([bytes(8), bytes(8), runs((1, -1, 0))]), "empty or of unequal length"),
        (with_row([bytes(8), bytes(8), runs((3, -1, 0), (-1, 0, 1))]), "empty or of unequal length"),
        (with_row([bytes(8), bytes(8), b"abc"]), "empty or of unequal length"),
        (with_row([bytes(7), bytes(7), runs((1, -1, 0))]), "empty or of unequal length"),
    ],
)
def test_what_no_trainer_could_read_is_refused(payload: bytes, told: str) -> None:
    with pytest.raises(RunError, match=told):
        check_frame(payload, group_id="a@0")


def test_a_damaged_length_never_asks_for_memory() -> None:
    row = RowFrame(token_ids=bytes(8), logprobs=bytes(8), runs=runs((2**31 - 1, -1, 0), (2**31 - 1, 0, 1)))
    with pytest.raises(ValueError, match="do not cover its 2 tokens"):
        row.to_contract()


def test_a_sequence_whose_every_token_differs_survives() -> None:
    count = 64
    row = TokenRow.of(
        token_ids=range(count),
        logprobs=[-0.5] * count,
        loss_mask=[at % 2 == 1 for at in range(count)],
        versions=[at % 3 - 1 for at in range(count)],
    )
    frame = RowFrame.of(row)
    assert len(frame.runs) == 4 * RUN_FIELDS * count
    back = frame.to_contract()
    assert (back.versions == row.versions).all()
    assert (back.loss_mask == row.loss_mask).all()


def test_runs_make_a_group_two_fifths_smaller() -> None:
    """Four bytes of an id and four of a logprob are left for each token, and little else."""
    assert len(encode_group(big_group("b", samples=8, tokens=1024)).payload) < 8 * 1024 * 8 + 2_000
