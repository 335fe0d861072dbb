"""The digest of weights does not depend on the order of tensors and changes with any difference."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from rollbook.contracts.weights import weights_digest


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


EMBED = Tensor("embed", "F32", (2, 3), np.arange(6, dtype=np.float32).tobytes())
HEAD = Tensor("head", "F32", (3,), np.ones(3, dtype=np.float32).tobytes())


def test_the_order_of_tensors_does_not_matter() -> None:
    assert weights_digest([EMBED, HEAD]) == weights_digest(iter([HEAD, EMBED]))


def test_bytes_and_a_view_of_them_give_the_same_digest() -> None:
    assert weights_digest([replace(HEAD, data=memoryview(HEAD.data))]) == weights_digest([HEAD])


@pytest.mark.parametrize(
    "other",
    [
        replace(EMBED, name="embed2"),
        replace(EMBED, dtype="I32"),
        replace(EMBED, shape=(3, 2)),
        replace(EMBED, data=np.arange(1, 7, dtype=np.float32).tobytes()),
    ],
)
def test_any_difference_gives_another_digest(other: Tensor) -> None:
    assert weights_digest([other, HEAD]) != weights_digest([EMBED, HEAD])


def test_a_missing_tensor_gives_another_digest() -> None:
    assert weights_digest([EMBED]) != weights_digest([EMBED, HEAD])
