"""Frames of groups that no producer of this package sends, and a way to store them past the checks."""

import math
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from rollbook.contracts.group import PromptGroup
from rollbook.contracts.group_codec import encode_group, payload_digest
from rollbook.ledger.rules.groups import Submission
from tests.parts.ledger.groups import submission_of


def runs(*triples: tuple[int, int, int]) -> bytes:
    return np.array(triples, dtype="<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def changed_frame(group: PromptGroup, **fields: object) -> bytes:
    """The frame of a group with other values."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode_group(group).payload), **fields})


def changed_sample(group: PromptGroup, **fields: object) -> bytes:
    """The frame of a group whose first sample has other values."""
    frame = msgspec.msgpack.decode(encode_group(group).payload)
    frame["samples"][0].update(fields)
    return msgspec.msgpack.encode(frame)


def past_the_door(group: PromptGroup, payload: bytes) -> Submission:
    """A submission that passes the checks as `group` and stores another payload."""
    encoded = msgspec.structs.replace(encode_group(group), payload=payload, digest=payload_digest(payload))
    return msgspec.structs.replace(submission_of(group), group=encoded)


@st.composite
def odd_samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The samples of a frame. Each value is usually good and sometimes bad."""

    def rarely(bad: st.SearchStrategy[Any], good: st.SearchStrategy[Any]) -> Any:
        return draw(bad if draw(st.integers(0, 19)) == 0 else good)

    samples = []
    for _ in range(draw(st.integers(1, 3))):
        rows = []
        for _ in range(rarely(st.just(0), st.integers(1, 2))):
            triples = [(rarely(st.integers(-1, 0), st.integers(1, 3)), -1, rarely(st.just(1), st.just(0)))]
            for _ in range(draw(st.integers(0, 9))):
                mark = rarely(st.integers(-1, 2), st.integers(0, 1))
                triples.append((draw(st.integers(1, 3)), rarely(st.integers(-2, 2**31 - 1), st.just(-1)), mark))
            length = rarely(st.integers(0, 8), st.just(sum(max(0, size) for size, _, _ in triples)))
            ids = [rarely(st.integers(-(2**31), 2**31 - 1), st.integers(0, 15)) for _ in range(length)]
            known = st.floats(-30, 0, width=32)
            logprobs = [rarely(st.floats(width=32), known | st.just(math.nan)) for _ in range(length)]
            rows.append([ints(*ids), floats(*logprobs), runs(*triples)])
        reward = rarely(st.floats() | st.none(), st.floats(-2, 2))
        sample: dict[str, Any] = {
            "sequences": rows,
            "sampling": {"temperature": rarely(st.sampled_from([0.0, 1e-9, 1e9]), st.just(1.0))},
            "reward": reward,
        }
        if reward is None or draw(st.integers(0, 19)) == 0:
            sample["invalid_cause"] = draw(st.sampled_from(["env", ""]))
        if draw(st.booleans()):
            end = rarely(st.integers(-1, 9), st.just(1))
            sample["turns"] = [{"sequence": rarely(st.integers(-1, 3), st.just(0)), "start": 0, "end": end}]
        if draw(st.integers(0, 3)) == 0:
            names = st.sampled_from(["weights", "advantages", "reference_logprobs"])
            sample["columns"] = [
                {
                    rarely(st.just("unknown"), names): floats(
                        *(rarely(st.floats(width=32), st.just(0.0)) for _ in range(len(ids) // 4))
                    )
                    + rarely(st.just(b"x"), st.just(b""))
                }
                for ids, _, _ in rows[rarely(st.just(1), st.just(0)) :]
            ]
        samples.append(sample)
    return samples
