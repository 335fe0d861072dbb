"""The digest of weights does not depend on the order of tensors and changes with any difference."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rollbook.contracts import weights as weights_module
from rollbook.contracts.weights import PIECE_BYTES, weights_digest


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


def test_the_number_of_threads_does_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    body = np.random.default_rng(0).integers(0, 256, 3 * PIECE_BYTES + 7, dtype=np.uint8).tobytes()
    tensors = [EMBED, Tensor("empty", "F32", (0,), b""), Tensor("large", "U8", (len(body),), body), HEAD]
    in_turn = weights_digest(tensors)
    monkeypatch.setattr(weights_module, "SHARE_BYTES", PIECE_BYTES)
    assert weights_digest(tensors) == in_turn


class Counted(bytearray):
    """Data that is alive until it is freed."""

    alive = 0

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


@dataclass(frozen=True)
class CopiedWhenRead:
    name: str
    dtype: str = "U8"
    shape: tuple[int, ...] = (100,)

    @property
    def data(self) -> memoryview:
        return memoryview(Counted(self.name.encode().ljust(100)))


def test_data_is_freed_after_it_was_hashed_and_the_digest_is_that_of_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"layer.{number}" for number in range(50)]
    at_once = weights_digest([Tensor(name, "U8", (100,), name.encode().ljust(100)) for name in names])
    most = []

    def hashed(pieces: Sequence[memoryview], pool: ThreadPoolExecutor) -> Iterable[bytes]:
        most.append(Counted.alive)
        return hashes(pieces, pool)

    hashes = weights_module._hashes
    monkeypatch.setattr(weights_module, "_hashes", hashed)
    monkeypatch.setattr(weights_module, "BATCH_BYTES", 250)
    assert weights_digest(CopiedWhenRead(name) for name in names) == at_once
    assert max(most) <= 6, "two batches of three tensors: one is read while the other is hashed"


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES])
def test_one_changed_byte_anywhere_in_a_large_tensor_gives_another_digest(at: int) -> None:
    body = bytearray(2 * PIECE_BYTES + 1)
    before = weights_digest([Tensor("large", "U8", (len(body),), bytes(body))])
    body[at] = 1
    assert weights_digest([Tensor("large", "U8", (len(body),), bytes(body))]) != before
